"""Compare the results of two experiments; differences within the noise between repeats do not count."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt
from statistics import mean
from typing import Any, Literal

from penstock.experiments.results import CaseResult, Figure, Results
from penstock.experiments.table import format_markdown_table
from penstock.models.settings_file import flatten_keys

Verdict = Literal["better", "worse", "no difference", "unknown"]
THROUGHPUT_FLOOR, TAIL_FLOOR = 0.05, 0.10  # few repeats may agree by chance, and few requests make up a tail
STANDARD_ERRORS = 3.0
RULE = (
    "A difference counts if the ratio is further from 1 than the noise: "
    f"{STANDARD_ERRORS:g} standard errors of the ratio, "
    "estimated from the spread between repeats of this case or of all cases, whichever is larger, and at least "
    f"{THROUGHPUT_FLOOR:.0%} for throughput and {TAIL_FLOOR:.0%} for p99. Anything smaller is no difference."
)
MAX_LISTED_DIFFERENCES = 12
FIGURES: Mapping[str, Callable[[CaseResult], Figure]] = {
    "throughput": lambda result: result.items_per_s,
    "p99": lambda result: result.latency("p99"),
    "first token": lambda result: result.first_token("p99"),
    "between tokens": lambda result: result.between_tokens("p99"),
}
TEXT_FIGURES = ("first token", "between tokens")


@dataclass(frozen=True, slots=True)
class FigureChange:
    """The change of one figure from experiment A to experiment B."""

    before: float
    after: float
    ratio: float
    noise: float | None  # as a share; None: single repeats have no spread
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class CaseChange:
    case: str
    variants: tuple[str, str]  # of experiments A and B; different if the cases were paired by their load
    unit: str
    throughput: FigureChange  # items per second
    p99: FigureChange
    note: str = ""
    first_token: FigureChange | None = None  # p99; only for generated text that both results streamed
    between_tokens: FigureChange | None = None

    @property
    def changes(self) -> list[FigureChange]:
        found = (self.throughput, self.p99, self.first_token, self.between_tokens)
        return [each for each in found if each is not None]


@dataclass(frozen=True, slots=True)
class Comparison:
    names: tuple[str, str]
    differences: tuple[str, ...]  # of machines and settings
    cases: tuple[CaseChange, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    rule: str = RULE

    @property
    def has_worse(self) -> bool:
        return any(each.verdict == "worse" for case in self.cases for each in case.changes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "has_worse": self.has_worse}


def compare(a: Results, b: Results) -> Comparison:
    ours = {result.case.id: result for result in a.cases if result.repeats}
    theirs = {result.case.id: result for result in b.cases if result.repeats}
    pairs = [(ours[name], theirs[name]) for name in ours if name in theirs]
    left_a = [result for name, result in ours.items() if name not in theirs]
    left_b = [result for name, result in theirs.items() if name not in ours]
    by_load = _pair_by_load(left_a, left_b)
    paired = {id(result) for pair in by_load for result in pair}
    every = [*ours.values(), *theirs.values()]
    pooled = {kind: estimate_variance([of(result).values for result in every]) for kind, of in FIGURES.items()}
    return Comparison(
        (a.experiment, b.experiment),
        (
            *_list_changes("machine", a.machine, b.machine),
            *_list_changes("settings", flatten_keys(a.settings), flatten_keys(b.settings)),
        ),
        tuple(_compare_case(*pair, pooled) for pair in (*pairs, *by_load)),
        tuple(result.case.id for result in left_a if id(result) not in paired),
        tuple(result.case.id for result in left_b if id(result) not in paired),
    )


def compare_figures(before: Figure, after: Figure, figure_name: str, variance: float | None) -> FigureChange:
    """Compare a figure of two experiments. `variance` is pooled over all cases; None if no case has two repeats."""
    ratio = after.mean / before.mean if before.mean else float("inf")
    own = estimate_variance([before.values, after.values])
    if variance is None or not 0 < ratio < float("inf"):
        return FigureChange(before.mean, after.mean, ratio, None, "unknown")
    error = sqrt(max(variance, own or 0.0) * (1 / len(before.values) + 1 / len(after.values)))
    noise = max(THROUGHPUT_FLOOR if figure_name == "throughput" else TAIL_FLOOR, exp(STANDARD_ERRORS * error) - 1)
    if abs(log(ratio)) <= log(1 + noise):
        verdict: Verdict = "no difference"
    else:
        verdict = "better" if (ratio > 1) == (figure_name == "throughput") else "worse"
    return FigureChange(before.mean, after.mean, ratio, noise, verdict)


def estimate_variance(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the pooled variance of the values' logarithms, which measures relative noise; None without repeats."""
    squares, freedom = 0.0, 0
    for values in groups:
        logs = [log(value) for value in values if value > 0]
        if len(logs) > 1:
            squares += sum((value - mean(logs)) ** 2 for value in logs)
            freedom += len(logs) - 1
    return squares / freedom if freedom else None


def _compare_case(a: CaseResult, b: CaseResult, pooled: Mapping[str, float | None]) -> CaseChange:
    found = {kind: compare_figures(of(a), of(b), kind, pooled[kind]) for kind, of in FIGURES.items()}
    text = (found[kind] if FIGURES[kind](a).values and FIGURES[kind](b).values else None for kind in TEXT_FIGURES)
    unsteady = " and ".join(name for name, result in (("A", a), ("B", b)) if not result.is_steady)
    return CaseChange(
        a.case.id if a.case.id == b.case.id else f"{a.case.id} → {b.case.id}",
        (a.case.variant, b.case.variant),
        b.unit,
        found["throughput"],
        found["p99"],
        f"{unsteady} not steady" if unsteady else "",
        *text,
    )


def _pair_by_load(a: Sequence[CaseResult], b: Sequence[CaseResult]) -> list[tuple[CaseResult, CaseResult]]:
    """Pair different variants of a model under the same load, if A and B each have exactly one variant."""
    ours, theirs = _group_by_load(a), _group_by_load(b)
    return [(ours[load][0], theirs[load][0]) for load in ours if len(ours[load]) == len(theirs.get(load, ())) == 1]


def _group_by_load(results: Sequence[CaseResult]) -> dict[tuple[object, ...], list[CaseResult]]:
    found: dict[tuple[object, ...], list[CaseResult]] = {}
    for result in results:
        case = result.case
        load = (case.model, case.protocol, case.data, case.load_id)
        found.setdefault(load, []).append(result)
    return found


def _list_changes(section: str, a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    keys = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
    lines = [f"{section} {key}: {a.get(key, '–')} → {b.get(key, '–')}" for key in keys]
    if len(lines) <= MAX_LISTED_DIFFERENCES:
        return lines
    return [*lines[:MAX_LISTED_DIFFERENCES], f"and {len(lines) - MAX_LISTED_DIFFERENCES} more of {section}"]


def to_markdown(comparison: Comparison) -> str:
    lines = [f"# {comparison.names[0]} (A) and {comparison.names[1]} (B)", "", comparison.rule, ""]
    lines += [f"- Differs: {difference}" for difference in comparison.differences]
    lines += [""] if comparison.differences else []
    lines += format_markdown_table(list_headers(comparison), list_rows(comparison))
    for name, cases in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if cases:
            lines += ["", f"Measured only in {name}: {', '.join(cases)}."]
    return "\n".join(lines) + "\n"


HEADERS = (
    *("case", "per s A", "per s B", "ratio", "noise", "throughput"),
    *("p99 A ms", "p99 B ms", "ratio", "noise", "p99"),
)


TEXT_HEADERS = tuple(
    f"{kind} {part}".strip() for kind in TEXT_FIGURES for part in ("p99 A ms", "p99 B ms", "ratio", "noise", "")
)


def has_text(comparison: Comparison) -> bool:
    return any(case.first_token is not None for case in comparison.cases)


def list_headers(comparison: Comparison) -> tuple[str, ...]:
    return (*HEADERS, *(TEXT_HEADERS if has_text(comparison) else ()))


def list_rows(comparison: Comparison) -> list[list[str]]:
    def text(case: CaseChange) -> list[str]:
        return (
            [*_format_figures(case.first_token), *_format_figures(case.between_tokens)] if has_text(comparison) else []
        )

    return [
        [
            case.case + (f" ({case.note})" if case.note else ""),
            *_format_figures(case.throughput),
            *_format_figures(case.p99),
            *text(case),
        ]
        for case in comparison.cases
    ]


def _format_figures(figure_change: FigureChange | None) -> list[str]:
    if figure_change is None:
        return ["–"] * 5
    noise = "–" if figure_change.noise is None else f"±{figure_change.noise:.0%}"
    return [
        f"{figure_change.before:.1f}",
        f"{figure_change.after:.1f}",
        f"{figure_change.ratio:.2f}",
        noise,
        figure_change.verdict,
    ]
