"""Evidence that a new block's answers are worse than those of the block that it replaces. Pure: no I/O.

Gateways count the outcomes of both blocks in the same moments. Bad outcomes are errors, answers slower than usual for
the old block, and requests that wait longer than usual. The new block's share of bad outcomes is compared with the old
block's share plus a margin. The new block is worse if chance would produce as many bad outcomes less than once in a
million times (Chernoff bound). Several time spans are checked, so that a block that becomes bad later is found as fast
as a block that is bad from the start.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, log, sqrt

from penstock.core.cluster.answer_counts import AnswerCounts, compute_quantile_s, compute_upper_bound_s, find_bucket

# Minus the natural logarithm of the probability that chance explains the bad outcomes.
SURE = 14.0  # beyond this the new block is worse
DOUBT = 3.0  # beyond this the new block is in doubt
CAUTION = 2.0  # standard errors that are added to the observed share of the old block
SPANS_S = (2.0, 10.0)  # checked in addition to the whole step
SLICE_S = 0.25
MIN_OUTCOMES = 5  # answers of the new block before errors are judged
MIN_LATENCIES = 20  # answers of the new block before latencies are judged: the first answers of a process are slow
MIN_OLD = 30  # outcomes of the old block in a span; with fewer, use all its outcomes since the rollout started
# Share of the new block's outcomes with simultaneous outcomes of the old block. With a smaller share, too, all outcomes
# of the old block are used.
MIN_COMPARED = 0.25
# Earlier latencies of the old block come from a different load. So they must be exceeded by this factor and for this
# time, which is longer than a pause that slows down everything. Until then the new block is only in doubt, so that the
# old block gets requests to compare with.
EARLIER_FACTOR = 1.5
EARLIER_S = 10.0
SLACK_S = 0.001  # a latency difference that does not matter
# A request is overdue if it waits for this multiple of the old block's p95, and at least for this time.
OVERDUE = 3.0
OVERDUE_S = 1.0
OVERDUE_MARGIN = 0.1  # allowed excess of the new block's share of overdue requests over its share of all requests
# Compared quantiles, each with the share of slow answers that is tolerated.
SLOW_MARGINS: tuple[tuple[float, float], ...] = ((0.5, 0.05), (0.95, 0.02))
# Errors caused by callers. If callers stick to blocks, a faulty caller may send all its requests to one block.
CALLERS_FAULTS = ("invalid_request", "invalid_tensor", "invalid_image", "session_error", "request_too_large")


@dataclass(slots=True)
class Sample:
    """The outcomes of a block's requests over some time."""

    answers: int = 0
    errors: int = 0
    refused: int = 0  # errors that callers may have caused
    latencies: dict[int, int] = field(default_factory=dict)

    def add(self, counts: AnswerCounts) -> None:
        refused = sum(count for code, count in counts.errors.items() if code in CALLERS_FAULTS)
        self.answers += counts.answers
        self.refused += refused
        self.errors += sum(counts.errors.values()) - refused
        _add_counts(self.latencies, counts.latencies)

    def merge(self, other: "Sample") -> None:
        self.answers += other.answers
        self.errors += other.errors
        self.refused += other.refused
        _add_counts(self.latencies, other.latencies)

    @property
    def outcomes(self) -> int:
        return self.answers + self.errors + self.refused

    @property
    def ran(self) -> int:
        return sum(self.latencies.values())

    def count_slower_than(self, bucket: int) -> int:
        return sum(count for each, count in self.latencies.items() if each > bucket)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The limits on how much worse than the old block the new block may be."""

    error_rate: float  # allowed excess over the old block's error rate; 1: errors are ignored
    slowdown: float  # allowed multiple of the old block's latency; 0: latency is ignored
    is_sticky: bool = False


@dataclass(slots=True)
class _Slice:
    at: float
    old: Sample = field(default_factory=Sample)  # from moments in which the new block also had requests
    new: Sample = field(default_factory=Sample)  # from moments in which the old block also had requests
    all_new: Sample = field(default_factory=Sample)

    def merge(self, other: "_Slice") -> None:
        self.old.merge(other.old)
        self.new.merge(other.new)
        self.all_new.merge(other.all_new)


class Evidence:
    """Compares the outcomes of two blocks since a rollout started."""

    def __init__(self, old: str, new: str) -> None:
        self._old_id = old
        self._new_id = new
        self._slices: deque[_Slice] = deque()
        self.old = Sample()  # since the rollout started
        self.new = Sample()
        self._step = _Slice(-inf)
        self._waiting: dict[str, dict[str, Mapping[int, int]]] = {}  # requests by gateway, block and age bucket
        self._outcomes: Counter[str] = Counter()  # of the new block, by gateway
        self._share = 0.0

    def begin_step(self, share: float, now: float) -> None:
        """Start a step in which the new block gets `share` of the requests; the totals of both blocks stay."""
        self._share = share
        self._step = _Slice(now)
        self._slices.clear()

    @property
    def step_answers(self) -> int:
        """Return the number of the new block's outcomes in this step."""
        return self._step.all_new.outcomes

    def add(self, gateway: str, counts: Iterable[AnswerCounts], now: float) -> None:
        """Add the counts of one gateway since its previous report."""
        waiting = self._waiting[gateway] = {}
        if not self._slices or now - self._slices[-1].at >= SLICE_S:
            self._slices.append(_Slice(now))
        while now - self._slices[0].at > SPANS_S[-1]:
            self._slices.popleft()
        for each in counts:
            for sample in self._find_samples(each):
                sample.add(each)
            if not each.is_control:
                waiting[each.block_id] = each.waiting
                self._outcomes[gateway] += each.outcomes if each.block_id == self._new_id else 0

    def _find_samples(self, counts: AnswerCounts) -> tuple[Sample, ...]:
        step, last = self._step, self._slices[-1]
        if counts.block_id == self._old_id:
            return (step.old, last.old) if counts.is_control else (self.old,)
        if counts.block_id == self._new_id:
            return (step.new, last.new) if counts.is_control else (self.new, step.all_new, last.all_new)
        return ()

    @property
    def gateways(self) -> int:
        """Return the number of gateways that have reported and have not left, at least 1."""
        return max(1, len(self._waiting))

    @property
    def most_outcomes(self) -> int:
        """Return the number of the new block's outcomes at the gateway that has the most outcomes."""
        return max(self._outcomes.values(), default=0)

    def gateway_left(self, gateway: str) -> None:
        """Remove the gateway's waiting requests from the comparison."""
        self._waiting.pop(gateway, None)
        self._outcomes.pop(gateway, None)

    def find_fault(self, tolerance: Tolerance, now: float, sure: float = SURE) -> str:
        """Return in what the new block is certainly worse, or an empty string; `sure` is the threshold of certainty."""
        if found := self.find_error_fault(tolerance, now, sure):
            return found
        if not tolerance.slowdown:
            return ""
        may_use_earlier = sure < SURE or now - self._step.at >= EARLIER_S
        for span in self._list_recent_spans(now):
            if found := self._find_latency_fault(span, tolerance.slowdown, sure, may_use_earlier):
                return found
        return self._find_overdue_fault(sure)

    def find_error_fault(self, tolerance: Tolerance, now: float, sure: float = SURE) -> str:
        """Like `find_fault`, but consider only the error rate."""
        found = (self._find_error_fault(span, tolerance, sure) for span in self._list_recent_spans(now))
        return next(filter(None, found), "")

    def _list_recent_spans(self, now: float) -> list[_Slice]:
        return [*[self._sum_since(now - span_s) for span_s in SPANS_S], self._step]

    def _sum_since(self, since: float) -> _Slice:
        span = _Slice(since)
        for each in self._slices:
            if each.at >= since:
                span.merge(each)
        return span

    def _find_error_fault(self, span: _Slice, tolerance: Tolerance, sure: float) -> str:
        old, new = span.old, span.new
        if old.outcomes < MIN_OLD or new.outcomes < MIN_COMPARED * span.all_new.outcomes:
            old, new = self.old, span.all_new
        count = new.outcomes
        if count < MIN_OUTCOMES:
            return ""
        # If callers stick to blocks, all faulty callers may be at one block.
        refusals = 0.5 if tolerance.is_sticky else tolerance.error_rate
        for bad, before, margin in (
            (new.errors, old.errors, tolerance.error_rate),
            (new.refused, old.refused, refusals),
        ):
            usual = min(0.5, compute_upper_share(before, old.outcomes)) + margin
            if is_beyond_chance(bad, count, usual, sure):
                return (
                    f"{bad} of {count} requests to the new block failed ({bad / count:.0%}), "
                    f"{before} of {old.outcomes} to the old block"
                )
        return ""

    def _find_latency_fault(self, span: _Slice, slowdown: float, sure: float, may_use_earlier: bool) -> str:
        old, new, margins = span.old, span.new, SLOW_MARGINS
        if old.ran < MIN_OLD:  # compare with the old block's earlier answers, by the median only
            old, new, slowdown = self.old, span.all_new, slowdown * EARLIER_FACTOR
            margins = SLOW_MARGINS[: int(may_use_earlier)]
        if old.ran < MIN_OLD or new.ran < MIN_LATENCIES:
            return ""
        for share, margin in margins:
            usual_s = compute_quantile_s(old.latencies, share) or 0.0
            slow = find_bucket(slowdown * usual_s + SLACK_S)
            bad, before = new.count_slower_than(slow), old.count_slower_than(slow)
            # The quantile itself is slower only if more answers are slow than lie above the quantile.
            if bad / new.ran > 1 - share and is_beyond_chance(
                bad, new.ran, compute_upper_share(before, old.ran) + margin, sure
            ):
                found_s = compute_quantile_s(new.latencies, share) or 0.0
                return (
                    f"the new block's p{share * 100:.0f} is {_format_ms(found_s)} over {new.ran} requests, "
                    f"the old block's {_format_ms(usual_s)}"
                )
        return ""

    def _find_overdue_fault(self, sure: float) -> str:
        """Return a fault if the new block has more than its share of the overdue requests."""
        usual_s = compute_quantile_s(self.old.latencies, 0.95)
        if usual_s is None:
            return ""
        bucket = find_bucket(max(OVERDUE_S, OVERDUE * usual_s))
        new, old = self._count_overdue(self._new_id, bucket), self._count_overdue(self._old_id, bucket)
        if new < MIN_LATENCIES or not is_beyond_chance(new, new + old, self._share + OVERDUE_MARGIN, sure):
            return ""
        limit = _format_ms(compute_upper_bound_s(bucket))
        return f"{new} requests to the new block have waited longer than {limit}, {old} to the old block"

    def _count_overdue(self, block_id: str, bucket: int) -> int:
        """Return the number of the block's requests that have waited longer than the bucket."""
        every = [waiting.get(block_id, {}) for waiting in self._waiting.values()]
        return sum(count for waiting in every for each, count in waiting.items() if each > bucket)


def _format_ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def compute_upper_share(bad: int, count: int) -> float:
    """Return the upper bound of the share of bad outcomes (Wilson score interval); 1 if `count` is 0."""
    if not count:
        return 1.0
    share, square = bad / count, CAUTION * CAUTION
    middle = share + square / (2 * count)
    spread = CAUTION * sqrt(share * (1 - share) / count + square / (4 * count * count))
    return (middle + spread) / (1 + square / count)


def is_beyond_chance(bad: int, count: int, usual: float, sure: float = SURE) -> bool:
    """Return whether `bad` of `count` are too many to be chance if the usual share of bad outcomes is `usual`."""
    share = bad / count
    if share <= usual:
        return False
    surplus = share * log(share / usual)
    if share < 1:
        surplus += (1 - share) * log((1 - share) / (1 - usual))
    return count * surplus > sure


def _add_counts(to: dict[int, int], more: Mapping[int, int]) -> None:
    for bucket, count in more.items():
        to[bucket] = to.get(bucket, 0) + count
