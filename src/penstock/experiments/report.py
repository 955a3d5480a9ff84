"""An experiment's results as one HTML page that fetches nothing."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from math import log10

import yaml

from penstock.experiments.load.latencies import Latencies
from penstock.experiments.plots import COLOURS, Axis, Chart, Curve, Point
from penstock.experiments.results import CaseResult, Figure, Results
from penstock.experiments.table import NOISE_RULE, cells, headers, measured, not_run, notes, number, share

# From the median to the tail; as many of them are drawn as the answers give.
CURVE = (50, 60, 70, 75, 80, 85, 90, 92.5, 95, 97, 98, 99, 99.5, 99.75, 99.9, 99.95, 99.99)
TICKS = (50, 75, 90, 95, 99, 99.9, 99.99)
TEXT_COLUMNS = ("variant", "steady", "accuracy", "loads", "why")
TRADE_OFF = "Right and low is better. Each point is a load; bars reach from the lowest to the highest repeat."
PERCENTILES = "All repeats together, as far into the tail as the number of answers allows. Lower is better."
TEXT_LEAD = "As the load generator saw them, of streamed answers. Right and low is better; each point is a load."
RESOURCES = "Every repeat of a case, warm-up included, sampled four times a second. CPU is in percent of one core."


def to_html(results: Results) -> str:
    found = measured(results)
    colours = {name: index for index, name in enumerate(dict.fromkeys(result.case.variant for result in found))}
    body = [
        _head(results),
        _summary(results, found),
        _section("Latency against throughput", TRADE_OFF, _legend(colours), _trade_off(found, colours)),
        _text(found, colours),
        _section("Latency percentiles", PERCENTILES, _legend(colours), _percentiles(found, colours)),
        _section("CPU and memory over time", RESOURCES, _legend({"gateway": 0, "worker": 1}), _resources(found)),
        _section("All figures", "Click a column to sort by it.", _figures(results, found)),
        _notes(found),
        _not_run(results),
        _settings(results),
    ]
    data = resources.files("penstock.experiments") / "data"
    style, script = ((data / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(results.experiment)} – Penstock experiment</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(body)}</main><script>{script}</script></body></html>\n"
    )


def _head(results: Results) -> str:
    machine = results.machine
    facts = [
        machine.get("processor", ""),
        f"{machine.get('cores')} cores",
        machine.get("memory", ""),
        f"Penstock {machine.get('penstock')}",
        results.updated.replace("T", " ").replace("+00:00", " UTC"),
        f"windows of {results.settings.get('experiment', {}).get('window_s', 0):g} s",
        f"settings {results.settings_hash[:8]}",
    ]
    chips = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return (
        f'<header><p class="kicker">Penstock experiment</p><h1>{escape(results.experiment)}</h1>'
        f'<p class="lead">{escape(results.description)}</p><ul class="chips">{chips}</ul></header>'
    )


def _summary(results: Results, found: Sequence[CaseResult]) -> str:
    if not found:
        return '<p class="lead">Nothing has been measured yet.</p>'
    fastest = max(found, key=lambda result: result.items_per_s.mean)
    quickest = min(found, key=lambda result: result.latency("p99").mean)
    p99 = quickest.latency("p99")
    noises = [result.items_per_s.spread for result in found if result.items_per_s.spread is not None]
    steady = sum(result.is_steady for result in found)
    repeats = max(len(result.repeats) for result in found)
    tiles = [
        (
            f"Most {fastest.unit} a second",
            number(fastest.items_per_s.mean),
            share(fastest.items_per_s),
            _load_of(fastest),
        ),
        ("Lowest p99", f"{number(p99.mean)} ms", share(p99), _load_of(quickest)),
        ("Measured", f"{len(found)} of {len(results.cases)}", "cases", f"{repeats} repeats, taken in turns"),
        ("Steady", f"{steady} of {len(found)}", "cases", "three windows within 10%"),
        ("Noise", f"±{max(noises):.0%}" if noises else "–", "at most", "throughput between repeats"),
    ]
    return '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>"


def _tile(name: str, value: str, beside: str, below: str) -> str:
    return (
        f'<div class="tile"><p class="name">{escape(name)}</p><p class="value">{escape(value)} '
        f"<small>{escape(beside)}</small></p><p class='below'>{escape(below)}</p></div>"
    )


def _load_of(result: CaseResult) -> str:
    return f"{result.case.variant}, {_load(result)}"


def _load(result: CaseResult) -> str:
    case = result.case
    callers = (
        f"{case.rate:g} requests/s" if case.rate else f"{case.concurrency} caller{'s' if case.concurrency > 1 else ''}"
    )
    return f"batch {case.batch_size}, {callers}"


def _section(title: str, lead: str, *parts: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{"".join(parts)}</section>'


def _legend(colours: dict[str, int]) -> str:
    items = (f'<li><i class="c{index % COLOURS}"></i>{escape(name)}</li>' for name, index in colours.items())
    return f'<ul class="legend">{"".join(items)}</ul>'


def _trade_off(found: Sequence[CaseResult], colours: dict[str, int]) -> str:
    """A chart for each batch size, so that points that a user could choose between are in one."""
    charts = []
    for size in sorted({result.case.batch_size for result in found}):
        group = [result for result in found if result.case.batch_size == size]
        unit = "/".join(dict.fromkeys(result.unit for result in group))
        title = "One prompt in a request" if unit == "tokens" else f"Batch size {size} ({unit} in a request)"
        charts.append(_against_rate(title, group, colours, "p99 latency, ms", lambda result: result.latency("p99")))
    return f'<div class="grid2">{"".join(charts)}</div>'


def _against_rate(
    title: str, found: Sequence[CaseResult], colours: dict[str, int], label: str, of: Callable[[CaseResult], Figure]
) -> str:
    def point(result: CaseResult) -> Point:
        rate, time = result.items_per_s, of(result)
        tip = (
            f"{_load_of(result)}: {number(rate.mean)} {result.unit}/s {share(rate)}, "
            f"p50 latency {number(result.latency('p50').mean)} ms, {label} {number(time.mean)} {share(time)}"
        )
        return Point(rate.mean, time.mean, tip, f"{result.case.pressure:g}", _range(rate), _range(time))

    by_callers = sorted(found, key=lambda result: result.case.pressure)
    series = [
        Curve(name, [point(each) for each in by_callers if each.case.variant == name], colour)
        for name, colour in colours.items()
    ]
    unit = "/".join(dict.fromkeys(result.unit for result in found))
    drawn = [each for each in series if each.points]
    return Chart(title, Axis(f"{unit} a second"), Axis(label, is_log=True), drawn).draw()


def _range(figure: Figure) -> tuple[float, float] | None:
    return (min(figure.values), max(figure.values)) if len(figure.values) > 1 else None


def _text(found: Sequence[CaseResult], colours: dict[str, int]) -> str:
    """What is drawn of generated text; nothing where there is none."""
    streamed = [each for each in found if each.first_token("p99").values and each.between_tokens("p99").values]
    if not streamed:
        return ""
    charts = "".join(
        _against_rate(f"Tokens a second and {label}", streamed, colours, label, of)
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
    for load, group in _by_load(streamed).items():
        curves[load] = "".join(_curves(f"{name}, {load}", group, colours, of) for name, of in times)
    shown = f'<div class="grid2">{charts}</div>' + _chooser("tokens", curves, shown=1)
    return _section("First token and time between tokens", TEXT_LEAD, _legend(colours), shown)


def _percentiles(found: Sequence[CaseResult], colours: dict[str, int]) -> str:
    charts = {
        load: _curves(load, group, colours, lambda result: result.latencies) for load, group in _by_load(found).items()
    }
    return _chooser("percentiles", charts, shown=2)


def _by_load(found: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    groups: dict[str, list[CaseResult]] = {}
    for each in found:
        groups.setdefault(_load(each), []).append(each)
    return groups


def _curves(
    name: str, group: Sequence[CaseResult], colours: dict[str, int], of: Callable[[CaseResult], Latencies]
) -> str:
    series = [Curve(each.case.variant, _curve(of(each)), colours[each.case.variant]) for each in group]
    last = max((point.x for each in series for point in each.points), default=0.0)
    ticks = [(_depth(percent), f"{percent:g}%") for percent in TICKS if _depth(percent) <= last + 1e-9]
    x = Axis("share that was at most this slow", starts_at_zero=False, ticks=ticks)
    return Chart(name, x, Axis("latency, ms", is_log=True), series).draw()


def _curve(latencies: Latencies) -> list[Point]:
    percents = [percent for percent in CURVE if len(latencies) * (1 - percent / 100) >= 1]
    values = [(percent, latencies.percentile_ms(percent)) for percent in percents]
    return [Point(_depth(percent), value, f"{percent:g}%: {number(value)} ms") for percent, value in values]


def _depth(percent: float) -> float:
    """So that 90, 99 and 99.9 are as far from each other."""
    return -log10(1 - percent / 100)


def _resources(found: Sequence[CaseResult]) -> str:
    charts = {}
    for result in found:
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
            Chart(f"CPU: {_load_of(result)}", seconds, Axis("% of one core"), cpu).draw()
            + Chart(f"Memory: {_load_of(result)}", seconds, Axis("resident, MiB"), memory).draw()
        )
    return _chooser("resources", charts, shown=1)


def _chooser(name: str, charts: dict[str, str], shown: int) -> str:
    """Without scripts everything is shown; with them, a few at a time, by a list to choose from."""
    options = "".join(f'<option value="{index}">{escape(key)}</option>' for index, key in enumerate(charts))
    panes = "".join(f'<div class="pane">{chart}</div>' for chart in charts.values())
    label = f'<label class="choose" hidden>Show <select aria-label="{name}">{options}</select></label>'
    return f'<div class="chooser" data-shown="{shown}">{label}<div class="grid2">{panes}</div></div>'


def _figures(results: Results, found: Sequence[CaseResult]) -> str:
    table = _table(headers(results), [cells(results, each) for each in found], is_sortable=True)
    return f'{table}<p class="fine">{escape(NOISE_RULE)}</p>'


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], is_sortable: bool = False) -> str:
    def line(tag: str, values: Iterable[str]) -> str:
        kinds = ("text" if name in TEXT_COLUMNS else "number" for name in names)
        return "".join(f'<{tag} class="{kind}">{value}</{tag}>' for kind, value in zip(kinds, values, strict=True))

    head = line("th", (f"<button>{escape(name)}</button>" if is_sortable else escape(name) for name in names))
    body = "".join(f"<tr>{line('td', map(escape, row))}</tr>" for row in rows)
    kind = ' class="figures"' if is_sortable else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _notes(found: Sequence[CaseResult]) -> str:
    items = [f"<li><b>{escape(each.case.id)}</b>: {escape(note)}</li>" for each in found for note in notes(each)]
    return f"<section><h2>Notes</h2><ul>{''.join(items)}</ul></section>" if items else ""


def _not_run(results: Results) -> str:
    rows = not_run(results)
    return f"<section><h2>Not run</h2>{_table(('variant', 'loads', 'why'), rows)}</section>" if rows else ""


def _settings(results: Results) -> str:
    machine = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in results.machine.items())
    settings = escape(yaml.safe_dump(results.settings, sort_keys=False, allow_unicode=True))
    return (
        f'<section><h2>Machine and configuration</h2><dl class="facts">{machine}</dl>'
        "<details><summary>The whole configuration, inheritance resolved</summary>"
        f"<pre>{settings}</pre></details></section>"
    )
