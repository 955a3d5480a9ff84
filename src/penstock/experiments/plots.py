"""Line charts as SVG text: nothing to install, nothing to fetch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 14, 44
COLOURS = 8  # classes c0 … c7, which the page's style gives their colours


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    tip: str = ""  # shown when pointed at
    label: str = ""  # shown always
    x_range: tuple[float, float] | None = None  # over repeats
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int = 0
    has_marks: bool = True
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """`ticks` are values with their texts; without them they are chosen."""

    label: str
    is_log: bool = False
    starts_at_zero: bool = True
    ticks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series] = field(default=())

    def draw(self) -> str:
        points = [point for series in self.series for point in series.points]
        if not points:
            return ""
        xs = [value for point in points for value in (point.x, *(point.x_range or ()))]
        ys = [value for point in points for value in (point.y, *(point.y_range or ()))]
        across = _Scale(self.x, xs, LEFT, WIDTH - RIGHT)
        up = _Scale(self.y, ys, HEIGHT - BOTTOM, TOP)
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            *self._grid(across, up),
            *(_line(series, across.place, up.place) for series in self.series),
            *(_marks(series, across.place, up.place) for series in self.series if series.has_marks),
            "</svg>",
        ]
        return f"<figure><figcaption>{escape(self.title)}</figcaption>{''.join(parts)}</figure>"

    def _grid(self, across: "_Scale", up: "_Scale") -> list[str]:
        floor_y, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        found = []
        for value, text in up.ticks:
            y = up.place(value)
            found.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            found.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>')
        for value, text in across.ticks:
            x = across.place(value)
            found.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{floor_y}"/>')
            found.append(
                f'<text class="tick" x="{x:.1f}" y="{floor_y + 16}" text-anchor="middle">{escape(text)}</text>'
            )
        middle = (LEFT + right) / 2
        found.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{floor_y}" y2="{floor_y}"/>')
        found.append(
            f'<text class="name" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x.label)}</text>'
        )
        found.append(
            f'<text class="name" transform="translate(13 {(TOP + floor_y) / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y.label)}</text>'
        )
        return found


class _Scale:
    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self._is_log = axis.is_log
        self._start, self._end = start, end
        low, high = min(values), max(values)
        if axis.is_log:
            self.ticks = list(axis.ticks) or _log_ticks(low, high)
        else:
            low = 0.0 if axis.starts_at_zero else low
            self.ticks = list(axis.ticks) or _ticks(low, high)
        edges = [value for value, _ in self.ticks]
        self._low = self._bend(min([low, *edges]))
        self._high = self._bend(max([high, *edges]))

    def place(self, value: float) -> float:
        width = (self._high - self._low) or 1.0
        return self._start + (self._bend(value) - self._low) / width * (self._end - self._start)

    def _bend(self, value: float) -> float:
        return log10(max(value, 1e-6)) if self._is_log else value


def _ticks(low: float, high: float, count: int = 7) -> list[tuple[float, str]]:
    """Round numbers: steps of 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / count or 1.0
    power = 10 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = floor(low / step)
    last = ceil(high / step - 1e-9)
    return [(number * step, short(number * step)) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    exponents = range(floor(log10(max(low, 1e-6))), ceil(log10(max(high, 1e-6))) + 1)
    steps = (1, 2, 5) if len(exponents) <= 4 else (1,)
    values = [step * 10.0**exponent for exponent in exponents for step in steps]
    below = [value for value in values if value <= low][-1:]
    above = [value for value in values if value >= high][:1]
    return [(value, short(value)) for value in values if below[0] <= value <= above[0]]


def short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 6):g}"


Place = Callable[[float], float]


def _line(series: Series, across: Place, up: Place) -> str:
    path = " ".join(f"{across(point.x):.1f},{up(point.y):.1f}" for point in series.points)
    faint = " faint" if series.is_faint else ""
    return f'<polyline class="line c{series.colour % COLOURS}{faint}" points="{path}"/>'


def _marks(series: Series, across: Place, up: Place) -> str:
    colour = f"c{series.colour % COLOURS}"
    parts = []
    for point in series.points:
        x, y = across(point.x), up(point.y)
        if point.x_range:
            ends = [across(value) for value in point.x_range]
            parts.append(
                f'<line class="noise {colour}" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        if point.y_range:
            ends = [up(value) for value in point.y_range]
            parts.append(
                f'<line class="noise {colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}"/>'
            )
        if point.label:
            parts.append(f'<text class="mark" x="{x + 7:.1f}" y="{y - 7:.1f}">{escape(point.label)}</text>')
        tip = f"<title>{escape(point.tip)}</title>" if point.tip else ""
        parts.append(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">{tip}</circle>')
    return "".join(parts)
