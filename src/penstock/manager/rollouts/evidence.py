"""Whether a block's answers are worse than those of the one that it is to replace. Decides; never acts.

Both are seen in the same moments, by what gateways count. What is bad (an error, an answer beyond what is slow for the
old block, a request that waits beyond it) is held against the old block's share of the same, with a margin: it is worse
only where so many would come by chance less than once in a million times (Chernoff's bound). Several spans of time are
looked at, so that what turns bad late is seen as soon as what is bad from the start.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, log, sqrt

from penstock.core.cluster.answer_counts import AnswerCounts, bucket_of, quantile_s, upper_bound_s

SURE = 14.0  # minus the logarithm of how likely chance is, beyond which it is not chance
DOUBT = 3.0  # and beyond which it may well be something else
CAUTION = 2.0  # standard errors by which the old block's share may be higher than was seen
SPANS_S = (2.0, 10.0)  # beside the whole of a step
SLICE_S = 0.25
LEAST_ERRORS_OF = 5  # answers before errors are judged
LEAST_LATENCIES = 20  # before latencies are: the first answers of a process are slow
LEAST_OLD = 30  # of the old block in a span; with fewer, all that it answered since the rollout began stands in
COMPARED = 0.25  # of the new block's outcomes that came while the old one had some; with fewer, the same
# Latencies from another time are under another load: they must be exceeded by so much more, and for longer than what
# slows everybody down for a moment. Before that it is a doubt, which brings the old block requests to compare with.
FROZEN = 1.5
FROZEN_S = 10.0
SLACK_S = 0.001  # a difference that matters to nobody
OVERDUE = 3.0  # a request that waits for so many times the old block's p95 is overdue
OVERDUE_S = 1.0  # and at least so long
OVERDUE_MARGIN = 0.1  # by which the new block's share of what is overdue may be above its share of the requests
SLOW_MARGINS: tuple[tuple[float, float], ...] = (
    (0.5, 0.05),
    (0.95, 0.02),
)  # quantiles that are compared, and the share of slow answers that is let pass
# Codes that the caller brought about: where callers stick to blocks, one of them may send nothing else.
CALLERS_FAULTS = ("invalid_request", "invalid_tensor", "invalid_image", "session_error", "request_too_large")


@dataclass(slots=True)
class Sample:
    """A block's answers of some time."""

    answers: int = 0
    errors: int = 0
    refused: int = 0  # errors that callers may have brought about
    latencies: dict[int, int] = field(default_factory=dict)

    def add(self, counts: AnswerCounts) -> None:
        refused = sum(count for code, count in counts.errors.items() if code in CALLERS_FAULTS)
        self.answers += counts.answers
        self.refused += refused
        self.errors += sum(counts.errors.values()) - refused
        _add(self.latencies, counts.latencies)

    def merge(self, other: "Sample") -> None:
        self.answers += other.answers
        self.errors += other.errors
        self.refused += other.refused
        _add(self.latencies, other.latencies)

    @property
    def outcomes(self) -> int:
        return self.answers + self.errors + self.refused

    @property
    def ran(self) -> int:
        return sum(self.latencies.values())

    def slower_than(self, bucket: int) -> int:
        return sum(count for each, count in self.latencies.items() if each > bucket)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """By how much the new block may be worse."""

    error_rate: float  # above the old one's; 1: errors do not matter
    slowdown: float  # times the old one's latency; 0: latency does not matter
    is_sticky: bool = False


@dataclass(slots=True)
class _Slice:
    at: float
    old: Sample = field(default_factory=Sample)  # in moments when the new block had requests, too
    new: Sample = field(default_factory=Sample)  # in moments when the old one had
    all_new: Sample = field(default_factory=Sample)

    def merge(self, other: "_Slice") -> None:
        self.old.merge(other.old)
        self.new.merge(other.new)
        self.all_new.merge(other.all_new)


class Evidence:
    """What was counted of two blocks since a rollout began."""

    def __init__(self, old: str, new: str) -> None:
        self._old_id = old
        self._new_id = new
        self._slices: deque[_Slice] = deque()
        self.old = Sample()  # since the rollout began
        self.new = Sample()
        self._step = _Slice(-inf)
        self._waiting: dict[str, dict[str, Mapping[int, int]]] = {}  # by gateway, block and the bucket of its age
        self._outcomes: Counter[str] = Counter()  # of the new block, by gateway
        self._share = 0.0

    def begin_step(self, share: float, now: float) -> None:
        """The new block gets this share of the requests. What was seen before stays known as a whole."""
        self._share = share
        self._step = _Slice(now)
        self._slices.clear()

    @property
    def step_answers(self) -> int:
        """Outcomes of the new block in this step."""
        return self._step.all_new.outcomes

    def add(self, gateway: str, counts: Iterable[AnswerCounts], now: float) -> None:
        """What one gateway has counted since it was last heard."""
        waiting = self._waiting[gateway] = {}
        if not self._slices or now - self._slices[-1].at >= SLICE_S:
            self._slices.append(_Slice(now))
        while now - self._slices[0].at > SPANS_S[-1]:
            self._slices.popleft()
        for each in counts:
            for sample in self._samples(each):
                sample.add(each)
            if not each.is_control:
                waiting[each.block_id] = each.waiting
                self._outcomes[gateway] += each.outcomes if each.block_id == self._new_id else 0

    def _samples(self, counts: AnswerCounts) -> tuple[Sample, ...]:
        step, last = self._step, self._slices[-1]
        if counts.block_id == self._old_id:
            return (step.old, last.old) if counts.is_control else (self.old,)
        if counts.block_id == self._new_id:
            return (step.new, last.new) if counts.is_control else (self.new, step.all_new, last.all_new)
        return ()

    @property
    def gateways(self) -> int:
        """That have been heard, and are not gone."""
        return max(1, len(self._waiting))

    @property
    def most_outcomes(self) -> int:
        """Of the new block at one gateway."""
        return max(self._outcomes.values(), default=0)

    def gateway_left(self, gateway: str) -> None:
        """What waited there is nobody's fault."""
        self._waiting.pop(gateway, None)
        self._outcomes.pop(gateway, None)

    def fault(self, tolerance: Tolerance, now: float, sure: float = SURE) -> str:
        """What is worse about the new block; empty: nothing that is so certain."""
        if found := self.error_fault(tolerance, now, sure):
            return found
        if not tolerance.slowdown:
            return ""
        may_freeze = sure < SURE or now - self._step.at >= FROZEN_S
        for span in self._spans(now):
            if found := self._latency_fault(span, tolerance.slowdown, sure, may_freeze):
                return found
        return self._overdue_fault(sure)

    def error_fault(self, tolerance: Tolerance, now: float, sure: float = SURE) -> str:
        """The same of failures alone."""
        found = (self._error_fault(span, tolerance, sure) for span in self._spans(now))
        return next(filter(None, found), "")

    def _spans(self, now: float) -> list[_Slice]:
        return [*[self._span(now - span_s) for span_s in SPANS_S], self._step]

    def _span(self, since: float) -> _Slice:
        span = _Slice(since)
        for each in self._slices:
            if each.at >= since:
                span.merge(each)
        return span

    def _error_fault(self, span: _Slice, tolerance: Tolerance, sure: float) -> str:
        old, new = span.old, span.new
        if old.outcomes < LEAST_OLD or new.outcomes < COMPARED * span.all_new.outcomes:
            old, new = self.old, span.all_new
        count = new.outcomes
        if count < LEAST_ERRORS_OF:
            return ""
        # Where callers stick to blocks, those with a fault may all have come to one.
        refusals = 0.5 if tolerance.is_sticky else tolerance.error_rate
        for bad, before, margin in (
            (new.errors, old.errors, tolerance.error_rate),
            (new.refused, old.refused, refusals),
        ):
            usual = min(0.5, at_most(before, old.outcomes)) + margin
            if is_beyond(bad, count, usual, sure):
                return (
                    f"{bad} of its {count} requests failed ({bad / count:.0%}); "
                    f"of the old block's {old.outcomes}, {before} did"
                )
        return ""

    def _latency_fault(self, span: _Slice, slowdown: float, sure: float, may_freeze: bool) -> str:
        old, new, margins = span.old, span.new, SLOW_MARGINS
        if old.ran < LEAST_OLD:
            old, new, slowdown, margins = self.old, span.all_new, slowdown * FROZEN, SLOW_MARGINS[: int(may_freeze)]
        if old.ran < LEAST_OLD or new.ran < LEAST_LATENCIES:
            return ""
        for share, margin in margins:
            usual_s = quantile_s(old.latencies, share) or 0.0
            slow = bucket_of(slowdown * usual_s + SLACK_S)
            bad, before = new.slower_than(slow), old.slower_than(slow)
            # More than belongs above the quantile itself, or it is not slower by that much.
            if bad / new.ran > 1 - share and is_beyond(bad, new.ran, at_most(before, old.ran) + margin, sure):
                found_s = quantile_s(new.latencies, share) or 0.0
                return (
                    f"its p{share * 100:.0f} is {_ms(found_s)} over {new.ran} requests, the old block's {_ms(usual_s)}"
                )
        return ""

    def _overdue_fault(self, sure: float) -> str:
        """Of requests that wait for long, the new block should have its share and no more."""
        usual_s = quantile_s(self.old.latencies, 0.95)
        if usual_s is None:
            return ""
        bucket = bucket_of(max(OVERDUE_S, OVERDUE * usual_s))
        new, old = self._overdue(self._new_id, bucket), self._overdue(self._old_id, bucket)
        if new < LEAST_LATENCIES or not is_beyond(new, new + old, self._share + OVERDUE_MARGIN, sure):
            return ""
        return f"{new} of its requests wait for longer than {_ms(upper_bound_s(bucket))}, of the old block's {old}"

    def _overdue(self, block_id: str, bucket: int) -> int:
        """Requests that the block has had for longer."""
        every = [waiting.get(block_id, {}) for waiting in self._waiting.values()]
        return sum(count for waiting in every for each, count in waiting.items() if each > bucket)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def at_most(bad: int, count: int) -> float:
    """What the share of the bad may be at most, by what was seen (Wilson); without anything seen, anything."""
    if not count:
        return 1.0
    share, square = bad / count, CAUTION**2
    middle = share + square / (2 * count)
    spread = CAUTION * sqrt(share * (1 - share) / count + square / (4 * count * count))
    return min(1.0, (middle + spread) / (1 + square / count))


def is_beyond(bad: int, count: int, usual: float, sure: float = SURE) -> bool:
    """Whether so many are bad not by chance, if they usually are in this share."""
    share = bad / count
    if share <= usual or usual >= 1:
        return False
    surplus = share * log(share / usual)
    if share < 1:
        surplus += (1 - share) * log((1 - share) / (1 - usual))
    return count * surplus > sure


def _add(to: dict[int, int], more: Mapping[int, int]) -> None:
    for bucket, count in more.items():
        to[bucket] = to.get(bucket, 0) + count
