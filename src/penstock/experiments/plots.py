"""Draw line charts as SVG text, without other packages."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 14, 44
COLOURS = 8  # the CSS classes c0 … c7 of report.css


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    tip: str = ""  # tooltip
    label: str = ""  # always visible
    x_range: tuple[float, float] | None = None  # lowest and highest repeat
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    points: Sequence[Point]
    colour: int = 0
    has_marks: bool = True
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart. `ticks` are values with labels; if empty, the chart chooses round numbers."""

    label: str
    is_log: bool = False
    starts_at_zero: bool = True
    ticks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    curves: Sequence[Curve] = ()

    def draw(self) -> str:
        points = [point for curve in self.curves for point in curve.points]
        if not points:
            return ""
        xs = [value for point in points for value in (point.x, *(point.x_range or ()))]
        ys = [value for point in points for value in (point.y, *(point.y_range or ()))]
        across = _Scale(self.x, xs, LEFT, WIDTH - RIGHT)
        up = _Scale(self.y, ys, HEIGHT - BOTTOM, TOP)
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            *self._draw_grid(across, up),
            *(_draw_path(curve, across, up) for curve in self.curves),
            *(_draw_marks(curve, across, up) for curve in self.curves if curve.has_marks),
            "</svg>",
        ]
        return f"<figure><figcaption>{escape(self.title)}</figcaption>{''.join(parts)}</figure>"

    def _draw_grid(self, across: "_Scale", up: "_Scale") -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        middle = f'x="{(LEFT + right) / 2}" y="{HEIGHT - 8}"'
        turned = f'transform="translate(13 {(TOP + bottom) / 2}) rotate(-90)"'
        found = [_draw_segment("axis", LEFT, right, bottom, bottom)]
        for value, text in up.ticks:
            y = up.place(value)
            found.append(_draw_segment("grid", LEFT, right, y, y))
            found.append(_draw_text("tick", f'x="{LEFT - 8}" y="{y + 3.5:.1f}"', text, "end"))
        for value, text in across.ticks:
            x = across.place(value)
            found.append(_draw_segment("grid", x, x, TOP, bottom))
            found.append(_draw_text("tick", f'x="{x:.1f}" y="{bottom + 16}"', text))
        return [*found, _draw_text("name", middle, self.x.label), _draw_text("name", turned, self.y.label)]


def _draw_segment(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _draw_text(kind: str, place: str, text: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" {place} text-anchor="{anchor}">{escape(text)}</text>'


class _Scale:
    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self._is_log = axis.is_log
        self._start, self._end = start, end
        low, high = min(values), max(values)
        if axis.starts_at_zero and not axis.is_log:
            low = 0.0
        self.ticks = list(axis.ticks) or (_choose_log_ticks if axis.is_log else _choose_ticks)(low, high)
        edges = [value for value, _ in self.ticks]
        self._low = self._transform(min([low, *edges]))
        self._high = self._transform(max([high, *edges]))

    def place(self, value: float) -> float:
        width = (self._high - self._low) or 1.0
        return self._start + (self._transform(value) - self._low) / width * (self._end - self._start)

    def _transform(self, value: float) -> float:
        return log10(max(value, 1e-6)) if self._is_log else value


def _choose_ticks(low: float, high: float, count: int = 7) -> list[tuple[float, str]]:
    """Return round numbers as ticks, with steps of 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / count or 1.0
    power = 10 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = floor(low / step)
    last = ceil(high / step - 1e-9)
    return [(number * step, format_short(number * step)) for number in range(first, last + 1)]


def _choose_log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    exponents = range(floor(log10(max(low, 1e-6))), ceil(log10(max(high, 1e-6))) + 1)
    steps = (1, 2, 5) if len(exponents) <= 4 else (1,)
    values = [step * 10.0**exponent for exponent in exponents for step in steps]
    below = [value for value in values if value <= low][-1:]
    above = [value for value in values if value >= high][:1]
    return [(value, format_short(value)) for value in values if below[0] <= value <= above[0]]


def format_short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 6):g}"


def _draw_path(curve: Curve, across: "_Scale", up: "_Scale") -> str:
    path = " ".join(f"{across.place(point.x):.1f},{up.place(point.y):.1f}" for point in curve.points)
    faint = " faint" if curve.is_faint else ""
    return f'<polyline class="line c{curve.colour % COLOURS}{faint}" points="{path}"/>'


def _draw_marks(curve: Curve, across: "_Scale", up: "_Scale") -> str:
    colour = f"c{curve.colour % COLOURS}"
    parts = []
    for point in curve.points:
        x, y = across.place(point.x), up.place(point.y)
        if point.x_range:
            low, high = map(across.place, point.x_range)
            parts.append(_draw_segment(f"noise {colour}", low, high, y, y))
        if point.y_range:
            low, high = map(up.place, point.y_range)
            parts.append(_draw_segment(f"noise {colour}", x, x, low, high))
        if point.label:
            parts.append(_draw_text("mark", f'x="{x + 7:.1f}" y="{y - 7:.1f}"', point.label, "start"))
        tip = f"<title>{escape(point.tip)}</title>" if point.tip else ""
        parts.append(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">{tip}</circle>')
    return "".join(parts)
