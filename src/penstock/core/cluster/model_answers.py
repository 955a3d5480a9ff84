"""A gateway's counts of answers per model since it started, which the manager adds up over all gateways."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class ModelAnswers(NamedTuple):
    model: str
    version: str
    codes: Mapping[str, int]  # requests, by `ok` or the error's code
    buckets: Sequence[int] = ()  # cumulative counts of successful requests, by latency bound
    seconds: float = 0.0  # total latency of successful requests

    def add_counts(self, other: "ModelAnswers") -> "ModelAnswers":
        codes = {code: self.codes.get(code, 0) + other.codes.get(code, 0) for code in {**self.codes, **other.codes}}
        if len(self.buckets) != len(other.buckets):  # one of them is empty
            buckets = self.buckets or other.buckets
        else:
            buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        return self._replace(codes=codes, buckets=buckets, seconds=self.seconds + other.seconds)
