"""What a scenario found: figures, the bars that they must meet, and details."""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class ScenarioBar:
    """What a figure must be: within [low, high]."""

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

    def must(self, figure: str, value: float, low: float = float("-inf"), high: float = float("inf")) -> None:
        self.figures[figure] = value
        self.bars.append(ScenarioBar(figure, low, high))

    def add(self, name: str, other: "Result") -> None:
        """Takes in what another found, its details under a name."""
        self.figures |= other.figures
        self.bars += other.bars
        self.details[name] = other.details

    def missed(self) -> list[ScenarioBar]:
        return [bar for bar in self.bars if not bar.is_met(self.figures)]


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """What a scenario may use: the shipped models, a folder of its own, and how long it may take."""

    models: Path
    folder: Path
    is_quick: bool
    say: Callable[[str], None] = lambda line: None
    chosen: str = ""  # of the attacks, those whose names have this in them
    malformed: int = 0  # messages; 0: as many as it takes


Scenario = Callable[[ChaosPlan], Coroutine[Any, Any, Result]]


async def run_parts(plan: ChaosPlan, parts: Mapping[str, Scenario]) -> Result:
    """Those that are chosen, one after the other."""
    result = Result()
    for name, part in parts.items():
        if plan.chosen in name:
            plan.say(name)
            result.add(name, await part(plan))
    return result


def print_table(results: Iterable[tuple[str, Result]], console: Console) -> None:
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
