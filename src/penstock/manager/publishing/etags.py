"""ETags of the resources that operators read and change. Pure: no I/O.

An ETag is `REVISION-DIGEST`: the revision of the resource's record in the metadata store, or 0 without a record, and a
digest of the resource's status. The digest leaves out figures, which change all the time. A request that changes a
resource may contain the ETag that the client has read. The revision in the ETag must still be the latest; the status
may have changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TypeVar

from google.protobuf.message import Message

from penstock.core.errors import Conflict, NameTaken, PreconditionFailed
from penstock.storage.metadata.metadata_store import Compare

M = TypeVar("M", bound=Message)
ANY = "*"
DIGEST_BYTES = 6
FIGURES: Mapping[str, Sequence[str]] = {
    "BlockStatus": ("requests", "errors", "latency_s"),
    "WorkerStatus": ("load", "silent_s"),
    "RolloutStatus": ("left_s", "answers", "missing_answers"),
}
ROLLED_BLOCK_FIGURES = ("outcomes", "errors", "p50_s", "p95_s")


def with_etag(status: M, revision: int) -> M:
    """Set the status's ETag and return the status."""
    digest = blake2b(remove_figures(status).SerializeToString(deterministic=True), digest_size=DIGEST_BYTES)
    status.MergeFrom(type(status)(etag=f"{revision}-{digest.hexdigest()}"))
    return status


def remove_figures(status: M) -> M:
    steady = type(status)()
    steady.CopyFrom(status)
    for name in FIGURES.get(status.DESCRIPTOR.name, ()):
        steady.ClearField(name)
    if status.DESCRIPTOR.name == "RolloutStatus":
        for side in ("old", "new"):
            for name in ROLLED_BLOCK_FIGURES:
                getattr(steady, side).ClearField(name)
    return steady


@contextmanager
def require_etag(expected: str, key: str, revisions: Mapping[str, int]) -> Iterator[list[Compare]]:
    """Yield the conditions of a write that replaces a record whose ETag must be one of the `expected` tags.

    `expected` is a list separated by commas; empty or `*` means no condition. Raise PreconditionFailed if no tag
    matches the record's last write, or if another write happens while the `with` block runs.
    """
    if expected in ("", ANY):
        yield []
        return
    revision = revisions.get(key, 0)
    if str(revision) not in [tag.strip().strip('"').partition("-")[0] for tag in expected.split(",")]:
        raise _make_changed_error(key)
    try:
        yield [Compare(key, revision)]
    except Conflict as error:
        if isinstance(error, NameTaken | PreconditionFailed):
            raise
        raise _make_changed_error(key) from error


def _make_changed_error(key: str) -> PreconditionFailed:
    return PreconditionFailed(f"'{key.partition('/')[2]}' has changed since it was read; read it again and retry")
