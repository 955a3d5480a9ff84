"""Metrics of requests and tokens by the name of the caller's key."""

from prometheus_client import Counter

from penstock.core.principals import Principal
from penstock.core.requests import InferResponse
from penstock.features.limits.limits import TOKENS
from penstock.telemetry.tally import CounterTally, Tallies

MAX_NAMES = 256  # names with their own label in the metrics of each gateway
OTHERS = "other"
OK = "ok"


class CallerCounts:
    """Counts requests and tokens of the first MAX_NAMES keys by name, and of all other keys together."""

    def __init__(self, counter: Counter, tokens: Counter, tallies: Tallies) -> None:
        self._counter = counter
        self._tokens = tokens
        self._tallies = tallies
        self._labels: dict[str, str] = {}  # by key
        self._answered: dict[str, CounterTally] = {}  # by label
        self._spent: dict[str, CounterTally] = {}  # by label

    def count_answered(self, principal: Principal) -> None:
        label = self._get_metric_label(principal)
        tally = self._answered.get(label)
        if tally is None:
            tally = self._answered[label] = self._tallies.add_counter(self._counter.labels(label, OK))
        tally.inc()

    def count_tokens(self, principal: Principal, response: InferResponse) -> None:
        """Count the tokens that an answer or a partial answer reports."""
        tokens = response.parameters.get(TOKENS)
        if not isinstance(tokens, int) or tokens <= 0:
            return
        label = self._get_metric_label(principal)
        tally = self._spent.get(label)
        if tally is None:
            tally = self._spent[label] = self._tallies.add_counter(self._tokens.labels(label))
        tally.inc(tokens)

    def count_failed(self, principal: Principal, code: str) -> None:
        self._counter.labels(self._get_metric_label(principal), code).inc()

    def _get_metric_label(self, principal: Principal) -> str:
        label = self._labels.get(principal.key_id)
        if label is None:
            if len(self._labels) >= MAX_NAMES:
                return OTHERS
            label = self._labels[principal.key_id] = principal.name
        return label
