"""Tags of what operators see: which write of the store a resource is of, and how it stands. Decides; never acts.

`REVISION-DIGEST`: the revision is that of its record in the metadata store, 0 where it has none; the digest is of all
that is told of it but its figures, which change all the time. Who changes something shows the tag that it was read
with, and its revision must still be the last: then nobody else has changed it. How it stands may be another meanwhile.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TypeVar

from google.protobuf.message import Message

from penstock.core.errors import Conflict, NameTaken, PreconditionFailed
from penstock.storage.metadata.base import Compare

M = TypeVar("M", bound=Message)
ANY = "*"
DIGEST_BYTES = 6
FIGURES: Mapping[str, Sequence[str]] = {
    "BlockStatus": ("requests", "errors", "latency_s"),
    "WorkerStatus": ("load", "silent_s"),
    "RolloutStatus": ("left_s", "answers", "missing_answers"),
}
FIGURES_OF_ROLLED = ("outcomes", "errors", "p50_s", "p95_s")


def tagged(status: M, revision: int) -> M:
    """The same, with its tag."""
    digest = blake2b(without_figures(status).SerializeToString(deterministic=True), digest_size=DIGEST_BYTES)
    status.MergeFrom(type(status)(etag=f"{revision}-{digest.hexdigest()}"))
    return status


def without_figures(status: M) -> M:
    steady = type(status)()
    steady.CopyFrom(status)
    for name in FIGURES.get(status.DESCRIPTOR.name, ()):
        steady.ClearField(name)
    if status.DESCRIPTOR.name == "RolloutStatus":
        for side in ("old", "new"):
            for name in FIGURES_OF_ROLLED:
                getattr(steady, side).ClearField(name)
    return steady


@contextmanager
def expecting(expected: str, key: str, revisions: Mapping[str, int]) -> Iterator[list[Compare]]:
    """What the store is to compare for one of these tags, which have commas between them; raises where none is
    of the last write, or another writes meanwhile."""
    if expected in ("", ANY):
        yield []
        return
    revision = revisions.get(key, 0)
    if str(revision) not in [tag.strip().strip('"').partition("-")[0] for tag in expected.split(",")]:
        raise _changed(key)
    try:
        yield [Compare(key, revision)]
    except Conflict as error:
        if isinstance(error, NameTaken | PreconditionFailed):
            raise
        raise _changed(key) from error


def _changed(key: str) -> PreconditionFailed:
    return PreconditionFailed(f"'{key.partition('/')[2]}' was changed since it was read: read it again")
