"""The partitions of the request log by time. Pure: no I/O."""

from collections.abc import Sequence
from typing import NamedTuple


class TimeSpan(NamedTuple):
    """A span of time from `start_us` to before `end_us`, in microseconds since 1970."""

    start_us: int
    end_us: int


def find_missing_spans(existing: Sequence[TimeSpan], first_us: int, last_us: int, step_us: int) -> list[TimeSpan]:
    """Return the spans to create, on a grid of `step_us`, so that every time from first to last is in a span.

    After a change of `step_us`, a span is cut where it would overlap an existing span of the earlier grid.
    """
    found: list[TimeSpan] = []
    at = first_us // step_us * step_us
    ordered = sorted(existing)
    while at <= last_us:
        end = at - at % step_us + step_us
        inside = next((span for span in ordered if span.start_us <= at < span.end_us), None)
        if inside is not None:
            at = inside.end_us
            continue
        following = min((span.start_us for span in ordered if at < span.start_us < end), default=end)
        if following > first_us:
            found.append(TimeSpan(at, following))
        at = following
    return found


def find_expired_spans(existing: Sequence[TimeSpan], before_us: int) -> list[TimeSpan]:
    """Return the spans that end before a time."""
    return [span for span in existing if span.end_us <= before_us]


def is_covered(existing: Sequence[TimeSpan], first_us: int, last_us: int) -> bool:
    """Return whether every time from first to last is in one of the spans."""
    for span in sorted(existing):
        if span.start_us <= first_us < span.end_us:
            first_us = span.end_us
    return last_us < first_us
