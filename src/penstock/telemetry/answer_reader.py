"""Reads a gateway's counts of answers from its own metrics, so that requests are counted only once."""

from prometheus_client import Counter, Histogram

from penstock.core.cluster.model_answers import ModelAnswers
from penstock.telemetry.metrics import ServingMetrics

Key = tuple[str, str]  # model and version


class AnswerReader:
    def __init__(self, metrics: ServingMetrics) -> None:
        self._metrics = metrics
        self._before = self._read_counts()  # counts of earlier processes, which shared counters keep after a restart
        self._last: dict[Key, ModelAnswers] = {}

    def read(self, is_all: bool) -> list[ModelAnswers]:
        """Return the counts since the process started; unless `is_all`, only of models whose counts changed."""
        before, self._last = (
            self._last,
            {key: self._subtract_earlier(key, found) for key, found in self._read_counts().items()},
        )
        return [found for key, found in self._last.items() if is_all or before.get(key) != found]

    def _subtract_earlier(self, key: Key, current: ModelAnswers) -> ModelAnswers:
        before = self._before.get(key)
        if before is None:
            return current
        codes = {code: count - before.codes.get(code, 0) for code, count in current.codes.items()}
        taken = before.buckets or [0] * len(current.buckets)
        buckets = [count - less for count, less in zip(current.buckets, taken, strict=True)]
        return current._replace(codes=codes, buckets=buckets, seconds=current.seconds - before.seconds)

    def _read_counts(self) -> dict[Key, ModelAnswers]:
        codes: dict[Key, dict[str, int]] = {}
        for labels, value in _read_samples(self._metrics.requests, "_total"):
            of_model = codes.setdefault(_make_model_key(labels), {})
            of_model[labels["code"]] = of_model.get(labels["code"], 0) + int(value)
        buckets: dict[Key, list[int]] = {}
        for labels, value in _read_samples(self._metrics.request_seconds, "_bucket"):
            buckets.setdefault(_make_model_key(labels), []).append(int(value))
        seconds = {
            _make_model_key(labels): value for labels, value in _read_samples(self._metrics.request_seconds, "_sum")
        }
        return {
            key: ModelAnswers(*key, found, buckets.get(key, []), seconds.get(key, 0.0))
            for key, found in codes.items()
            if key[0]
        }


def _make_model_key(labels: dict[str, str]) -> Key:
    return labels["model"], labels["version"]


def _read_samples(metric: Counter | Histogram, ending: str) -> list[tuple[dict[str, str], float]]:
    return [
        (dict(sample.labels), sample.value)
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith(ending)
    ]
