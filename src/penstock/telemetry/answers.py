"""What this gateway has answered, read from its own metrics: counting it twice would cost every request."""

from prometheus_client import Counter, Histogram

from penstock.core.cluster.model_answers import ModelAnswers
from penstock.telemetry.metrics import ServingMetrics

Key = tuple[str, str]  # model and version


class AnswerReader:
    def __init__(self, metrics: ServingMetrics) -> None:
        self._metrics = metrics
        self._before = self._read()  # counters go on over restarts: what an earlier process counted is not this one's
        self._told: dict[Key, ModelAnswers] = {}

    def read(self, is_all: bool) -> list[ModelAnswers]:
        """Since the process began, of the models whose counts are others than those that were told last, or of all."""
        told, self._told = self._told, {key: self._less(key, found) for key, found in self._read().items()}
        return [found for key, found in self._told.items() if is_all or told.get(key) != found]

    def _less(self, key: Key, found: ModelAnswers) -> ModelAnswers:
        before = self._before.get(key)
        if before is None:
            return found
        codes = {code: count - before.codes.get(code, 0) for code, count in found.codes.items()}
        taken = before.buckets or [0] * len(found.buckets)
        buckets = [count - less for count, less in zip(found.buckets, taken, strict=True)]
        return found._replace(codes=codes, buckets=buckets, seconds=found.seconds - before.seconds)

    def _read(self) -> dict[Key, ModelAnswers]:
        codes: dict[Key, dict[str, int]] = {}
        for labels, value in _samples(self._metrics.requests, "_total"):
            of_model = codes.setdefault(_key(labels), {})
            of_model[labels["code"]] = of_model.get(labels["code"], 0) + int(value)
        buckets: dict[Key, list[int]] = {}
        for labels, value in _samples(self._metrics.request_seconds, "_bucket"):
            buckets.setdefault(_key(labels), []).append(int(value))
        seconds = {_key(labels): value for labels, value in _samples(self._metrics.request_seconds, "_sum")}
        return {
            key: ModelAnswers(*key, found, buckets.get(key, []), seconds.get(key, 0.0))
            for key, found in codes.items()
            if key[0]
        }


def _key(labels: dict[str, str]) -> Key:
    return labels["model"], labels["version"]


def _samples(metric: Counter | Histogram, ending: str) -> list[tuple[dict[str, str], float]]:
    return [
        (dict(sample.labels), sample.value)
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith(ending)
    ]
