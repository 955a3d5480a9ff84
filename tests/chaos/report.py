"""A scenario's result: figures, the bars that they must meet, and details."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class ScenarioBar:
    """The required range of a figure: from `low` to `high`."""

    figure: str
    low: float = float("-inf")
    high: float = float("inf")

    def is_met(self, figures: dict[str, float]) -> bool:
        return self.figure in figures and self.low <= figures[self.figure] <= self.high

    def __str__(self) -> str:
        if self.low == self.high:
            return f"= {self.low:g}"
        return f"≥ {self.low:g}" if self.high == float("inf") else f"≤ {self.high:g}"


@dataclass(slots=True)
class Result:
    figures: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    bars: list[ScenarioBar] = field(default_factory=list)
    meanings: dict[str, str] = field(default_factory=dict)  # explanations of figures

    def must(self, figure: str, value: float, low: float = float("-inf"), high: float = float("inf")) -> None:
        self.figures[figure] = value
        self.bars.append(ScenarioBar(figure, low, high))

    def add(self, name: str, other: "Result") -> None:
        """Add the figures and bars of another result, and its details under `name`."""
        self.figures |= other.figures
        self.bars += other.bars
        self.meanings |= other.meanings
        self.details[name] = other.details

    def missed(self) -> list[ScenarioBar]:
        return [bar for bar in self.bars if not bar.is_met(self.figures)]


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The options of a scenario, and its resources: the shipped models and a scratch folder."""

    models: Path
    folder: Path
    is_quick: bool
    say: Callable[[str], None] = lambda line: None
    chosen: tuple[str, ...] = ("",)  # run the parts and attacks whose names contain one of these
    malformed: int = 0  # number of malformed messages; 0: the default

    def chooses(self, name: str) -> bool:
        return any(text in name for text in self.chosen)


Scenario = Callable[[ChaosPlan], Coroutine[Any, Any, Result]]


async def run_parts(plan: ChaosPlan, parts: Mapping[str, Scenario]) -> Result:
    """Run the chosen parts of a scenario, one after another, and combine their results."""
    result = Result()
    for name, part in parts.items():
        if plan.chooses(name):
            plan.say(name)
            result.add(name, await part(plan))
    return result


def print_table(results: Sequence[tuple[str, Result]], console: Console) -> None:
    table = Table(title="faults")
    for name in ("scenario", "figure", "value", "bar", ""):
        table.add_column(name, justify="right" if name == "value" else "left")
    for scenario, result in results:
        bars = {bar.figure: bar for bar in result.bars}
        for figure, value in result.figures.items():
            bar = bars.get(figure)
            verdict = "" if bar is None else "[green]met[/]" if bar.is_met(result.figures) else "[red]missed[/]"
            table.add_row(scenario, figure, f"{value:,.4g}" if value % 1 else f"{value:,.0f}", str(bar or ""), verdict)
        table.add_section()
    console.print(table)
    for _, result in results:
        for figure, meaning in result.meanings.items():
            console.print(f"{figure}: {meaning}")
