"""What is counted of those who ask, by the names of their keys: of so many, and of all others together."""

from prometheus_client import Counter

from penstock.access.limits import TOKENS
from penstock.core.principals import Principal
from penstock.core.requests import InferResponse
from penstock.telemetry.tally import CounterTally, Tallies

MAX_NAMES = 256  # each is a label in every gateway
OTHERS = "other"
OK = "ok"


class CallerCounts:
    def __init__(self, counter: Counter, tokens: Counter, tallies: Tallies) -> None:
        self._counter = counter
        self._tokens = tokens
        self._tallies = tallies
        self._labels: dict[str, str] = {}  # by key
        self._answered: dict[str, CounterTally] = {}  # by label
        self._spent: dict[str, CounterTally] = {}  # so, too

    def answered(self, principal: Principal) -> None:
        label = self._label(principal)
        tally = self._answered.get(label)
        if tally is None:
            tally = self._answered[label] = self._tallies.counter(self._counter.labels(label, OK))
        tally.inc()

    def spent(self, principal: Principal, response: InferResponse) -> None:
        """Counts the tokens that an answer tells of, or a part of one."""
        tokens = response.parameters.get(TOKENS)
        if not isinstance(tokens, int) or tokens <= 0:
            return
        label = self._label(principal)
        tally = self._spent.get(label)
        if tally is None:
            tally = self._spent[label] = self._tallies.counter(self._tokens.labels(label))
        tally.inc(tokens)

    def failed(self, principal: Principal, code: str) -> None:
        self._counter.labels(self._label(principal), code).inc()

    def _label(self, principal: Principal) -> str:
        label = self._labels.get(principal.key_id)
        if label is None:
            if len(self._labels) >= MAX_NAMES:
                return OTHERS
            label = self._labels[principal.key_id] = principal.name
        return label
