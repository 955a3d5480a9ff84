"""The report in Markdown: an overview and all figures of each group, then the verdicts."""

from collections.abc import Mapping, Sequence

from benchmarks.peers.figures import NamedFigure, compute_named_figures
from benchmarks.peers.plan import CEILING, GROUPS, PENSTOCK, Group
from benchmarks.peers.results import PeerResults, Record
from benchmarks.peers.summary import SummaryLine, list_absences, summarize
from benchmarks.peers.verdicts import P99, THROUGHPUT, Verdict, judge
from penstock.experiments.table import format_markdown_table

REASON_CHARACTERS = 300
DETAILS = ("load", "conc.", "server", "setting", "protocol", "requests/s", "±", "p50 ms", "p99 ms")
COSTS = ("CPU ms a request", "memory MiB", "notes")


def render(results: PeerResults) -> str:
    lines = summarize(results.records)
    machine = results.machine
    parts = [
        f"Measured on {machine['cores']} cores of {machine['processor']}, Python {machine['python']}. Figures are "
        "medians of the rounds; ± is the furthest round's distance from the median. CPU and memory are those "
        "of all the server's processes."
    ]
    for group in GROUPS:
        own = [line for line in lines if line.group == group.name]
        absent = list_absences(results.records, group.name)
        if own or absent:
            parts += [
                f"## {group.title} (`{group.name}`)",
                _format_overview(group, own, absent),
                _format_details(group, own),
            ]
    parts += ["## Verdicts", _format_verdicts(judge(lines)), _format_figures(compute_named_figures(lines))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _format_overview(group: Group, lines: Sequence[SummaryLine], absent: Sequence[Record]) -> str:
    """Return requests per second, p50 and p99 of each contender over each protocol."""
    windows = [(level.name, level.concurrency) for level in group.levels]
    is_plain = len({load for load, _ in windows}) == 1
    names = [f"{'' if is_plain else load + ' '}c{concurrency}" for load, concurrency in windows]
    body = []
    for own in _sort_contenders(lines).values():
        found = {(line.load, line.concurrency): line for line in own}
        first = own[0]
        cells = [_format_cell(found.get(window) or found.get((window[0], 0))) for window in windows]
        body.append([_format_title(first.title, first.kind), first.setting, first.protocol, *cells])
    width = len(windows)
    body += [
        [_format_title(one.title, one.kind), one.setting, "", _format_reason(one), *[""] * (width - 1)]
        for one in absent
    ]
    return "Requests/s · p50 ms · p99 ms:\n\n" + _format_markdown(("server", "setting", "protocol", *names), body)


def _format_cell(line: SummaryLine | None) -> str:
    if line is None:
        return ""
    rate = _format_number(line.rps)
    return rate if line.server == CEILING else f"{rate} · {_format_number(line.p50_ms)} · {_format_number(line.p99_ms)}"


def _format_details(group: Group, lines: Sequence[SummaryLine]) -> str:
    """Return all figures, sorted by throughput at each concurrency."""
    if not lines:
        return ""
    loads = list(dict.fromkeys(level.name for level in group.levels))
    order = sorted(lines, key=lambda line: (loads.index(line.load), line.concurrency, -line.rps))
    return _format_markdown((*DETAILS, *COSTS), [_format_detail(line) for line in order])


def _format_detail(line: SummaryLine) -> list[str]:
    rate = [_format_number(line.rps), f"{line.spread:.0%}"]
    if line.server == CEILING:
        return [line.load, "", line.title, "", "", *rate, "", "", "", "", ""]
    latencies = [_format_number(line.p50_ms), _format_number(line.p99_ms)]
    costs = [f"{line.cpu_ms:.2f}", f"{line.memory_mib:.0f}", line.notes]
    title = _format_title(line.title, line.kind)
    return [line.load, str(line.concurrency), title, line.setting, line.protocol, *rate, *latencies, *costs]


def _format_verdicts(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "None: they need Penstock and a peer in one group."
    note = (
        "Penstock over the best peer in that figure. `any`: each one's best of REST and gRPC. `offered`: of settings "
        "that the peer's documentation offers; `by hand`: of those whose handler calls OpenVINO itself."
    )
    rows = [_format_verdict(verdict) for verdict in verdicts]
    return note + "\n\n" + _format_markdown(list(rows[0]), [list(row.values()) for row in rows])


def _format_figures(figures: Mapping[str, NamedFigure]) -> str:
    rows = [
        [f"`{key}`", f"{found.value:.2f}", f"{'≤' if found.is_ceiling else '≥'} {found.bar:g}"]
        for key, found in figures.items()
    ]
    return _format_markdown(("figure", "value", "bar"), rows) if rows else ""


def _format_verdict(verdict: Verdict) -> dict[str, str]:
    values = [line.rps if verdict.figure == THROUGHPUT else line.p99_ms for line in (verdict.ours, verdict.best)]
    ours, peer = verdict.ours, verdict.best
    bar = ""
    if verdict.bar:
        sign = "≤" if verdict.figure == P99 else ">" if verdict.bar.is_strict else "≥"
        bar = f"{sign} {verdict.bar.value:g}"
    return {
        "group": ours.group,
        "load": ours.load,
        "conc.": str(ours.concurrency),
        "figure": verdict.figure,
        "protocol": verdict.scope,
        "Penstock": _format_number(values[0]),
        "best peer": f"{_format_title(peer.title, peer.kind)}, {peer.protocol}",
        "": _format_number(values[1]),
        "ratio": f"{verdict.ratio:.2f}",
        "rounds": f"{verdict.low:.2f}–{verdict.high:.2f}",
        "bar": bar,
        "verdict": verdict.outcome,
    }


def _sort_contenders(lines: Sequence[SummaryLine]) -> dict[tuple[str, ...], list[SummaryLine]]:
    """Return the ceiling, Penstock, and then the peers in their given order."""
    found: dict[tuple[str, ...], list[SummaryLine]] = {}
    for line in sorted(lines, key=lambda line: (line.server != CEILING, line.server != PENSTOCK)):
        found.setdefault((line.server, line.kind, line.setting, line.protocol), []).append(line)
    return found


def _format_title(title: str, kind: str) -> str:
    return f"{title} ({kind})" if kind else title


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _format_reason(record: Record) -> str:
    return (
        f"failed: {_escape_markdown(record.failure)}"
        if record.failure
        else f"takes no part: {_escape_markdown(record.refusal)}"
    )


def _escape_markdown(text: str) -> str:
    short = text if len(text) <= REASON_CHARACTERS else text[:REASON_CHARACTERS] + " …"
    return " ".join(short.split())


def _format_markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join(format_markdown_table(head, body))
