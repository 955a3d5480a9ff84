"""Write an experiment's results as a self-contained HTML page."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from math import log10

import yaml

from penstock.experiments.load.latencies import Latencies
from penstock.experiments.plots import COLOURS, Axis, Chart, Curve, Point
from penstock.experiments.results import CaseResult, Figure, Results
from penstock.experiments.table import NOISE_RULE, cells, headers, measured, not_run, notes, number, share

# Percentiles from the median to the tail. A percentile is drawn if there are enough answers to measure it.
CURVE = (50, 60, 70, 75, 80, 85, 90, 92.5, 95, 97, 98, 99, 99.5, 99.75, 99.9, 99.95, 99.99)
TICKS = (50, 75, 90, 95, 99, 99.9, 99.99)
TEXT_COLUMNS = ("variant", "steady", "accuracy", "loads", "why")
TRADE_OFF = "Right and low is better. Each point is a load; bars reach from the lowest to the highest repeat."
PERCENTILES = "All repeats together, as far into the tail as the number of answers allows. Lower is better."
TEXT_LEAD = "Measured by the load generator on streamed answers. Right and low is better; each point is a load."
RESOURCES = "Every repeat of a case, including warm-up, sampled four times per second. CPU is in percent of one core."


def to_html(results: Results) -> str:
    found = measured(results)
    colours = {name: index for index, name in enumerate(dict.fromkeys(result.case.variant for result in found))}
    body = [
        _render_header(results),
        _render_summary(results, found),
        _render_section(
            "Latency against throughput", TRADE_OFF, _render_legend(colours), _draw_trade_off(found, colours)
        ),
        _render_text_section(found, colours),
        _render_section("Latency percentiles", PERCENTILES, _render_legend(colours), _draw_percentiles(found, colours)),
        _render_section(
            "CPU and memory over time", RESOURCES, _render_legend({"gateway": 0, "worker": 1}), _draw_resources(found)
        ),
        _render_section("All figures", "Click a column to sort by it.", _render_figures(results, found)),
        _render_notes(found),
        _render_not_run(results),
        _render_settings(results),
    ]
    data = resources.files("penstock.experiments") / "data"
    style, script = ((data / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(results.experiment)} – Penstock experiment</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(body)}</main><script>{script}</script></body></html>\n"
    )


def _render_header(results: Results) -> str:
    machine = results.machine
    properties = [
        machine.get("processor", ""),
        f"{machine.get('cores')} cores",
        machine.get("memory", ""),
        f"Penstock {machine.get('penstock')}",
        results.updated.replace("T", " ").replace("+00:00", " UTC"),
        f"windows of {results.settings.get('experiment', {}).get('window_s', 0):g} s",
        f"settings {results.settings_hash[:8]}",
    ]
    chips = "".join(f"<li>{escape(each)}</li>" for each in properties)
    return (
        f'<header><p class="kicker">Penstock experiment</p><h1>{escape(results.experiment)}</h1>'
        f'<p class="lead">{escape(results.description)}</p><ul class="chips">{chips}</ul></header>'
    )


def _render_summary(results: Results, measured_cases: Sequence[CaseResult]) -> str:
    if not measured_cases:
        return '<p class="lead">Nothing has been measured yet.</p>'
    fastest = max(measured_cases, key=lambda result: result.items_per_s.mean)
    quickest = min(measured_cases, key=lambda result: result.latency("p99").mean)
    p99 = quickest.latency("p99")
    noises = [result.items_per_s.spread for result in measured_cases if result.items_per_s.spread is not None]
    steady = sum(result.is_steady for result in measured_cases)
    repeats = max(len(result.repeats) for result in measured_cases)
    tiles = [
        (
            f"Most {fastest.unit} per second",
            number(fastest.items_per_s.mean),
            share(fastest.items_per_s),
            _describe_case(fastest),
        ),
        ("Lowest p99", f"{number(p99.mean)} ms", share(p99), _describe_case(quickest)),
        ("Measured", f"{len(measured_cases)} of {len(results.cases)}", "cases", f"{repeats} repeats, taken in turns"),
        ("Steady", f"{steady} of {len(measured_cases)}", "cases", "three windows within 10%"),
        ("Noise", f"±{max(noises):.0%}" if noises else "–", "at most", "throughput between repeats"),
    ]
    return '<div class="tiles">' + "".join(_render_tile(*tile) for tile in tiles) + "</div>"


def _render_tile(name: str, value: str, unit: str, caption: str) -> str:
    return (
        f'<div class="tile"><p class="name">{escape(name)}</p><p class="value">{escape(value)} '
        f"<small>{escape(unit)}</small></p><p class='below'>{escape(caption)}</p></div>"
    )


def _describe_case(result: CaseResult) -> str:
    return f"{result.case.variant}, {_describe_load(result)}"


def _describe_load(result: CaseResult) -> str:
    case = result.case
    callers = (
        f"{case.rate:g} requests/s" if case.rate else f"{case.concurrency} caller{'s' if case.concurrency > 1 else ''}"
    )
    return f"batch {case.batch_size}, {callers}"


def _render_section(title: str, lead: str, *parts: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{"".join(parts)}</section>'


def _render_legend(colours: dict[str, int]) -> str:
    items = (f'<li><i class="c{index % COLOURS}"></i>{escape(name)}</li>' for name, index in colours.items())
    return f'<ul class="legend">{"".join(items)}</ul>'


def _draw_trade_off(measured_cases: Sequence[CaseResult], colours: dict[str, int]) -> str:
    """Draw one chart per batch size, so that a chart shows the choices for one kind of request."""
    charts = []
    for size in sorted({result.case.batch_size for result in measured_cases}):
        group = [result for result in measured_cases if result.case.batch_size == size]
        unit = "/".join(dict.fromkeys(result.unit for result in group))
        title = "One prompt per request" if unit == "tokens" else f"Batch size {size} ({unit} per request)"
        charts.append(
            _draw_against_rate(title, group, colours, "p99 latency, ms", lambda result: result.latency("p99"))
        )
    return f'<div class="grid2">{"".join(charts)}</div>'


def _draw_against_rate(
    title: str,
    found: Sequence[CaseResult],
    colours: dict[str, int],
    label: str,
    read_figure: Callable[[CaseResult], Figure],
) -> str:
    def point(result: CaseResult) -> Point:
        rate, time = result.items_per_s, read_figure(result)
        tip = (
            f"{_describe_case(result)}: {number(rate.mean)} {result.unit}/s {share(rate)}, "
            f"p50 latency {number(result.latency('p50').mean)} ms, {label} {number(time.mean)} {share(time)}"
        )
        return Point(rate.mean, time.mean, tip, f"{result.case.pressure:g}", _compute_range(rate), _compute_range(time))

    by_callers = sorted(found, key=lambda result: result.case.pressure)
    series = [
        Curve(name, [point(each) for each in by_callers if each.case.variant == name], colour)
        for name, colour in colours.items()
    ]
    unit = "/".join(dict.fromkeys(result.unit for result in found))
    drawn = [each for each in series if each.points]
    return Chart(title, Axis(f"{unit} per second"), Axis(label, is_log=True), drawn).draw()


def _compute_range(figure: Figure) -> tuple[float, float] | None:
    return (min(figure.values), max(figure.values)) if len(figure.values) > 1 else None


def _render_text_section(measured_cases: Sequence[CaseResult], colours: dict[str, int]) -> str:
    """Return the section about generated text, or an empty string if no text was streamed."""
    streamed = [each for each in measured_cases if each.first_token("p99").values and each.between_tokens("p99").values]
    if not streamed:
        return ""
    charts = "".join(
        _draw_against_rate(f"Tokens per second and {label}", streamed, colours, label, of)
        for label, of in (
            ("first token, p99 ms", lambda result: result.first_token("p99")),
            ("between tokens, p99 ms", lambda result: result.between_tokens("p99")),
        )
    )
    times: Sequence[tuple[str, Callable[[CaseResult], Latencies]]] = (
        ("first token", lambda result: result.first_tokens),
        ("between tokens", lambda result: result.times_between),
    )
    curves = {}
    for load, group in _group_by_load(streamed).items():
        curves[load] = "".join(_draw_curves(f"{name}, {load}", group, colours, of) for name, of in times)
    shown = f'<div class="grid2">{charts}</div>' + _render_chooser("tokens", curves, shown=1)
    return _render_section("First token and time between tokens", TEXT_LEAD, _render_legend(colours), shown)


def _draw_percentiles(measured_cases: Sequence[CaseResult], colours: dict[str, int]) -> str:
    charts = {
        load: _draw_curves(load, group, colours, lambda result: result.latencies)
        for load, group in _group_by_load(measured_cases).items()
    }
    return _render_chooser("percentiles", charts, shown=2)


def _group_by_load(measured_cases: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    groups: dict[str, list[CaseResult]] = {}
    for each in measured_cases:
        groups.setdefault(_describe_load(each), []).append(each)
    return groups


def _draw_curves(
    name: str, group: Sequence[CaseResult], colours: dict[str, int], read_figure: Callable[[CaseResult], Latencies]
) -> str:
    series = [
        Curve(each.case.variant, _compute_points(read_figure(each)), colours[each.case.variant]) for each in group
    ]
    last = max((point.x for each in series for point in each.points), default=0.0)
    ticks = [
        (_percentile_position(percent), f"{percent:g}%")
        for percent in TICKS
        if _percentile_position(percent) <= last + 1e-9
    ]
    x = Axis("percentile", starts_at_zero=False, ticks=ticks)
    return Chart(name, x, Axis("latency, ms", is_log=True), series).draw()


def _compute_points(latencies: Latencies) -> list[Point]:
    percents = [percent for percent in CURVE if len(latencies) * (1 - percent / 100) >= 1]
    values = [(percent, latencies.percentile_ms(percent)) for percent in percents]
    return [
        Point(_percentile_position(percent), value, f"{percent:g}%: {number(value)} ms") for percent, value in values
    ]


def _percentile_position(percent: float) -> float:
    """Return a percentile's position on a logarithmic axis with equal distances between 90, 99 and 99.9."""
    return -log10(1 - percent / 100)


def _draw_resources(measured_cases: Sequence[CaseResult]) -> str:
    charts = {}
    for result in measured_cases:
        cpu: list[Curve] = []
        memory: list[Curve] = []
        for repeat in result.repeats:
            is_faint = repeat is not result.repeats[-1]
            for colour, role in enumerate(("gateway", "worker")):
                for curves, figure in ((cpu, f"{role}_cpu"), (memory, f"{role}_mib")):
                    points = [Point(sample.at_s, getattr(sample, figure)) for sample in repeat.samples]
                    curves.append(Curve(role, points, colour, False, is_faint))
        seconds = Axis("seconds")
        charts[result.case.id] = (
            Chart(f"CPU: {_describe_case(result)}", seconds, Axis("% of one core"), cpu).draw()
            + Chart(f"Memory: {_describe_case(result)}", seconds, Axis("resident, MiB"), memory).draw()
        )
    return _render_chooser("resources", charts, shown=1)


def _render_chooser(name: str, charts: dict[str, str], shown: int) -> str:
    """Return charts, and a menu that selects the `shown` visible charts; without JavaScript, all charts are visible."""
    options = "".join(f'<option value="{index}">{escape(key)}</option>' for index, key in enumerate(charts))
    panes = "".join(f'<div class="pane">{chart}</div>' for chart in charts.values())
    label = f'<label class="choose" hidden>Show <select aria-label="{name}">{options}</select></label>'
    return f'<div class="chooser" data-shown="{shown}">{label}<div class="grid2">{panes}</div></div>'


def _render_figures(results: Results, measured_cases: Sequence[CaseResult]) -> str:
    table = _render_table(headers(results), [cells(results, each) for each in measured_cases], is_sortable=True)
    return f'{table}<p class="fine">{escape(NOISE_RULE)}</p>'


def _render_table(names: Sequence[str], rows: Iterable[Sequence[str]], is_sortable: bool = False) -> str:
    def line(tag: str, values: Iterable[str]) -> str:
        kinds = ("text" if name in TEXT_COLUMNS else "number" for name in names)
        return "".join(f'<{tag} class="{kind}">{value}</{tag}>' for kind, value in zip(kinds, values, strict=True))

    head = line("th", (f"<button>{escape(name)}</button>" if is_sortable else escape(name) for name in names))
    body = "".join(f"<tr>{line('td', map(escape, row))}</tr>" for row in rows)
    kind = ' class="figures"' if is_sortable else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _render_notes(measured_cases: Sequence[CaseResult]) -> str:
    items = [
        f"<li><b>{escape(each.case.id)}</b>: {escape(note)}</li>" for each in measured_cases for note in notes(each)
    ]
    return f"<section><h2>Notes</h2><ul>{''.join(items)}</ul></section>" if items else ""


def _render_not_run(results: Results) -> str:
    rows = not_run(results)
    return f"<section><h2>Not run</h2>{_render_table(('variant', 'loads', 'why'), rows)}</section>" if rows else ""


def _render_settings(results: Results) -> str:
    machine = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in results.machine.items())
    settings = escape(yaml.safe_dump(results.settings, sort_keys=False, allow_unicode=True))
    return (
        f'<section><h2>Machine and configuration</h2><dl class="facts">{machine}</dl>'
        "<details><summary>The whole configuration, including inherited settings</summary>"
        f"<pre>{settings}</pre></details></section>"
    )
