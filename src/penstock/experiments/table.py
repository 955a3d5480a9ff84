"""Format an experiment's results as table cells and as Markdown."""

from collections.abc import Callable, Sequence
from math import isnan

from penstock.experiments.load.load_process import sum_refusals
from penstock.experiments.load.steady import count_refusals
from penstock.experiments.results import PERCENTILES, CaseResult, Figure, Results, TextRepeat

TEXT_PERCENTILES = ("p50", "p90", "p99")
NOISE_RULE = (
    "± is the distance of the furthest repeat from the mean of the repeats. A case is steady if three windows in a "
    "row agreed within 10% in every repeat. CPU is the server's, in percent of one core; memory is the server's peak "
    "resident memory. Accuracy is compared with FP32: the mean and the lowest sample. With fewer than 1,000 answers, "
    "p99.9 is the slowest answer."
)


def columns(results: Results) -> "Sequence[Column]":
    """Return the table's columns, including the columns of generated text if a case has text."""
    return (*COLUMNS, *TEXT_COLUMNS) if any(result.text_repeats for result in results.cases) else COLUMNS


def headers(results: Results) -> list[str]:
    return [name.format(unit=units(results)) for name, _ in columns(results)]


def cells(results: Results, result: CaseResult) -> list[str]:
    return [write(result) for _, write in columns(results)]


def accuracy(result: CaseResult) -> str:
    found = result.accuracy
    if found is None:
        return "–"
    digits = 5 if found.measure == "cosine" else 1
    return f"{found.measure} {found.mean:.{digits}f} (≥ {found.lowest:.{digits}f})"


def number(value: float) -> str:
    """Format a value with about three significant digits, which is the precision of the measurements."""
    if isnan(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def share(figure: Figure) -> str:
    return "–" if figure.spread is None else f"±{figure.spread:.0%}"


def _format_mean(read_figure: Callable[[CaseResult, str], Figure], name: str) -> Callable[[CaseResult], str]:
    return lambda result: number(read_figure(result, name).mean)


Column = tuple[str, Callable[[CaseResult], str]]
COLUMNS: Sequence[Column] = (
    ("variant", lambda result: result.case.variant),
    ("batch", lambda result: str(result.case.batch_size)),
    ("callers", lambda result: f"{result.case.rate:g}/s" if result.case.rate else str(result.case.concurrency)),
    ("requests/s", lambda result: number(result.rps.mean)),
    ("{unit}/s", lambda result: number(result.items_per_s.mean)),
    ("±", lambda result: share(result.items_per_s)),
    *((f"{name} ms", _format_mean(CaseResult.latency, name)) for name in PERCENTILES),
    ("p99 ±", lambda result: share(result.latency("p99"))),
    ("steady", lambda result: "yes" if result.is_steady else "no"),
    ("accuracy", accuracy),
    ("CPU %", lambda result: f"{result.cpu_percent.mean:.0f}"),
    ("memory MiB", lambda result: f"{result.memory_mib.mean:.0f}"),
    ("generator CPU", lambda result: f"{result.figure(lambda repeat: repeat.generator_cpu_share).mean:.0%}"),
    ("answers", lambda result: str(sum(repeat.answered for repeat in result.repeats))),
)


def _read_median_rate(repeat: TextRepeat) -> float | None:
    return (repeat.request_tokens_per_s or {}).get("p50")


TEXT_COLUMNS: Sequence[Column] = (
    *((f"first token {name} ms", _format_mean(CaseResult.first_token, name)) for name in TEXT_PERCENTILES),
    *((f"between tokens {name} ms", _format_mean(CaseResult.between_tokens, name)) for name in TEXT_PERCENTILES),
    ("tokens/s each", lambda result: number(result.text(_read_median_rate).mean)),
    ("prompt tokens", lambda result: number(result.text(lambda repeat: repeat.prompt_tokens_mean).mean)),
    ("answer tokens", lambda result: number(result.text(lambda repeat: repeat.output_tokens_mean).mean)),
    ("goodput/s", lambda result: number(result.text(lambda repeat: repeat.goodput_per_s).mean)),
)


def measured(results: Results) -> list[CaseResult]:
    return [result for result in results.cases if result.repeats]


def not_run(results: Results) -> list[tuple[str, str, str]]:
    """Return the variant, the loads and the reason of every case without results."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results.cases:
        if result.not_run or not result.repeats:
            reason = result.not_run or "not measured yet"
            load = result.case.load_id
            found.setdefault((result.case.variant, reason), []).append(load)
    return [(variant, ", ".join(loads), reason) for (variant, reason), loads in found.items()]


def notes(result: CaseResult) -> list[str]:
    """Return warnings about a case's figures."""
    found = []
    if rejected := sum_refusals(repeat.rejected for repeat in result.repeats):
        found.append(f"not served: {count_refusals(rejected)}")
    if any(repeat.generator_cpu_share > 0.8 for repeat in result.repeats):
        found.append("the load generator ran out of CPU: raise `experiment.generators`")
    return found


def units(results: Results) -> str:
    return "/".join(dict.fromkeys(result.unit for result in results.cases))


def to_markdown(results: Results) -> str:
    machine = results.machine
    lines = [
        f"# {results.experiment}",
        "",
        *([results.description, ""] if results.description else []),
        f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('memory')}; "
        f"Penstock {machine.get('penstock')}; {results.updated}; settings {results.settings_hash}.",
        "",
    ]
    found = measured(results)
    if found:
        rows = [cells(results, result) for result in found]
        lines += [*format_markdown_table(headers(results), rows), "", NOISE_RULE, ""]
    for result in found:
        lines += [f"- {result.case.id}: {note}" for note in notes(result)]
    if left := not_run(results):
        lines += [
            "## Not run",
            "",
            *format_markdown_table(["variant", "loads", "why"], [list(row) for row in left]),
            "",
        ]
    return "\n".join(lines)


def format_markdown_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    def line(values: Sequence[object]) -> str:
        return "| " + " | ".join(str(value).replace("|", "\\|").replace("\n", " ") for value in values) + " |"

    return [line(names), "|" + "---|" * len(names), *(line(row) for row in rows)]
