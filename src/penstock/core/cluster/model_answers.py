"""What a gateway has answered for a model since it began: for who adds up the gateways of a cluster."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class ModelAnswers(NamedTuple):
    model: str
    version: str
    codes: Mapping[str, int]  # requests by `ok` or an error's code
    buckets: Sequence[int] = ()  # of what succeeded, how many took no longer than each bound, and all
    seconds: float = 0.0  # that these took together

    def plus(self, other: "ModelAnswers") -> "ModelAnswers":
        codes = {code: self.codes.get(code, 0) + other.codes.get(code, 0) for code in {**self.codes, **other.codes}}
        if len(self.buckets) != len(other.buckets):  # one of them has counted none
            buckets = self.buckets or other.buckets
        else:
            buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        return self._replace(codes=codes, buckets=buckets, seconds=self.seconds + other.seconds)
