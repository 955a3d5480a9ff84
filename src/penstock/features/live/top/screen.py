"""Draws the screen of `penstock top`, which fits 80 columns and 24 lines, and uses more if available."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime

from rich.console import Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.core.error_text import show_size
from penstock.features.live.live_view import EventCount, Generating, LiveBlock, LiveDevice, LiveView, LiveWorker

FIXED_LINES = 19  # all lines except the rows of blocks and workers, and the lines for generated text
GENERATING_LINES = 2
DEVICE_LINES = 2  # blank line and title of the GPU table, which is shown if there is room
DEVICE_COLUMNS = 62  # width of a device's row before its blocks
WIDE = 110
WORKER_COLUMNS = 64  # width of a worker's row before its blocks
BAR_CELLS = 24
SPARKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {"ready": "green", "loading": "yellow", "empty": "yellow", "draining": "yellow"}


class History(deque[LiveView]):
    """The last events; the newest is at the end."""

    def __init__(self) -> None:
        super().__init__(maxlen=BAR_CELLS)


def draw_screen(http: str, history: History, width: int, height: int | None, trouble: str = "") -> RenderableType:
    """Draw the newest event. Without `height` the screen is as long as needed; `trouble` says why no events come."""
    if not history:
        return Text(f"reconnecting: {trouble}" if trouble else f"waiting for the first data from {http}", "yellow")
    view = history[-1]
    fixed = FIXED_LINES + (GENERATING_LINES if view.generating is not None else 0)
    fixed += bool(view.devices)
    left = None if height is None else max(2, height - fixed)
    workers = view.workers if left is None else view.workers[: max(1, left - len(view.blocks), left // 3)]
    blocks = view.blocks if left is None else _select_busiest(view.blocks, left - len(workers))
    phases: RenderableType = _make_phases_table(view)
    if width >= WIDE:
        beside = Table.grid(padding=(0, 4))
        beside.add_row(phases, _make_batch_reasons_table(view), _make_history_table(history))
        phases = beside
    rows = len(workers) + len(blocks) + DEVICE_LINES + len(view.devices)
    has_room = view.devices and (left is None or rows <= left)
    devices: list[RenderableType] = ["", _make_devices_table(view, width)] if has_room else []
    return Group(
        _draw_header(http, view, trouble), *_draw_summary_lines(view, width >= WIDE), "", phases, "",
        _make_blocks_table(blocks, len(view.blocks) - len(blocks), width), "",
        _make_workers_table(workers, len(view.workers) - len(workers), view.blocks, width),
        *devices,
        "" if height is None else Text("q quits", "dim"),
    )  # fmt: skip


def _draw_header(http: str, view: LiveView, problem: str) -> RenderableType:
    state = "draining" if view.draining else "ready" if view.ready else "not ready"
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    at = datetime.fromtimestamp(view.at).strftime("%H:%M:%S")
    shown = f"[bold]{escape(view.server)} {escape(view.version)}[/] [{STATE_STYLES.get(state, 'red')}]{state}[/]"
    if problem:
        line.add_row(f"{shown} [bold red]reconnecting[/] [red]{escape(problem)}[/]", f"[dim]seen {at}[/]")
    else:
        line.add_row(f"{shown} [dim]{escape(http)}[/]", f"[dim]last {view.seconds:.1f} s, {at}[/]")
    return line


def _draw_summary_lines(view: LiveView, is_wide: bool) -> Iterable[RenderableType]:
    now, batches = view.now, view.work.batches
    codes = "  ".join(f"{escape(code)} {_show_number(rate)}" for code, rate in view.work.by_code.items())
    yield _draw_labelled_line("requests", f"[bold]{_show_number(view.work.requests_per_s)}[/] /s   {codes}")
    yield _draw_labelled_line(
        "inside",
        f"[bold]{now.inflight_requests}[/] in flight ({show_size(now.inflight_bytes)})   waiting {now.waiting}   "
        f"running {now.running}   on workers {now.waiting_on_workers}",
    )
    padding = "" if batches.padding is None else f"   padding x{batches.padding:.2f}"
    yield _draw_labelled_line(
        "batches", f"[bold]{_show_number(batches.per_s)}[/] /s   {_show_number(batches.rows_mean)} rows{padding}"
    )
    if not is_wide:
        yield _draw_labelled_line("batch sent", _show_shares(batches.closed))
    if view.generating is not None:
        yield from _draw_generation_lines(view.generating)
    if view.devices:
        yield _draw_labelled_line("GPUs", "   ".join(map(_format_device, view.devices)))
    troubles = [(each.name.replace("_", " "), getattr(view.troubles, each.name)) for each in fields(view.troubles)]
    yield _draw_labelled_line("trouble", "  ".join(f"{name} {_format_event_counts(found)}" for name, found in troubles))


def _draw_generation_lines(found: Generating) -> Iterable[RenderableType]:
    cache = f"   cache {_format_cache_use(found)} of {found.cache_blocks}" if found.cache_blocks else ""
    yield _draw_labelled_line(
        "text",
        f"[bold]{_show_number(found.tokens_per_s)}[/] tokens/s   {_show_number(found.request_tokens_per_s)} each   "
        f"running {found.running}   waiting {found.waiting}{cache}",
    )
    first = found.first_token if found.first_token.count else found.engine_first_token  # no answer is streamed
    between = found.between_tokens if found.between_tokens.count else found.engine_between_tokens
    prefix = "" if found.prefix_hits is None else f"   prefix {found.prefix_hits:.0%}"
    preempted = f"   preempted {_format_event_counts({'': found.preemptions})}" if found.preemptions.total else ""
    yield _draw_labelled_line(
        "first token",
        f"p50 {_show_ms(first.p50_ms)}  p99 {_show_ms(first.p99_ms)} ms   next p50 {_show_ms(between.p50_ms)}  "
        f"p99 {_show_ms(between.p99_ms)} ms   prompts {_show_number(found.prompt_tokens_per_s)}/s{prefix}{preempted}",
    )


def _format_device(device: LiveDevice) -> str:
    memory = f"{show_size(device.used_bytes)} of {show_size(device.memory_bytes)}"
    return f"[bold]{_show_share(device.busy)}[/] {memory} {escape(device.name)}"


def _format_cache_use(found: Generating) -> str:
    return _show_share(found.cache_blocks_used / found.cache_blocks if found.cache_blocks else None)


def _draw_labelled_line(name: str, markup: str) -> Text:
    line = Text.from_markup(f"[dim]{name:<12}[/]{markup}")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _format_event_counts(counts: Mapping[str, EventCount]) -> str:
    total, new = sum(each.total for each in counts.values()), sum(each.count for each in counts.values())
    return f"{total} [bold red]+{new}[/]" if new else str(total)


def _show_shares(rates: Mapping[str, float]) -> str:
    total = sum(rates.values())
    return "  ".join(f"{name} {rate / total:.0%}" for name, rate in rates.items() if rate) or "-"


def _make_phases_table(view: LiveView) -> Table:
    table = _make_table("ms", "mean", "p50", "p95", "p99", "where the time goes")
    longest = max((phase.mean_ms or 0.0 for phase in view.work.phases.values()), default=0.0) or 1.0
    for name, found in (("request", view.work.latency), *view.work.phases.items()):
        figures = [_show_ms(each) for each in (found.mean_ms, found.p50_ms, found.p95_ms, found.p99_ms)]
        bar = "" if name == "request" else _draw_bar((found.mean_ms or 0.0) / longest)
        table.add_row(f"[bold]{name}[/]" if name == "request" else name, *figures, bar)
    table.columns[-1].justify = "left"
    return table


def _make_batch_reasons_table(view: LiveView) -> Table:
    table = _make_table("why batch was sent", "/s", "share")
    total = sum(view.work.batches.closed.values()) or 1.0
    for reason, rate in view.work.batches.closed.items():
        table.add_row(escape(reason), _show_number(rate), _draw_bar(rate / total))
    table.columns[-1].justify = "left"
    return table


def _make_history_table(history: History) -> Table:
    table = _make_table("history", "")
    table.add_row("requests /s", _draw_sparkline([view.work.requests_per_s for view in history]))
    table.add_row("p99", _draw_sparkline([view.work.latency.p99_ms or 0.0 for view in history]))
    if history[-1].generating is not None:
        table.add_row(
            "tokens /s", _draw_sparkline([view.generating.tokens_per_s if view.generating else 0.0 for view in history])
        )
    return table


def _draw_sparkline(values: Sequence[float]) -> str:
    largest = max(values, default=0.0) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, int(value / largest * len(SPARKS)))] for value in values)


def _draw_bar(share: float) -> str:
    return f"[blue]{'━' * round(share * BAR_CELLS)}[/]"


def _select_busiest(blocks: Sequence[LiveBlock], number: int) -> Sequence[LiveBlock]:
    """Return all blocks in the server's order, or the `number` blocks with the most requests if there are more."""
    if len(blocks) <= number:
        return blocks
    return sorted(blocks, key=lambda block: -block.work.requests_per_s)[: max(1, number)]


def _make_blocks_table(blocks: Iterable[LiveBlock], left_out: int, width: int) -> Table:
    blocks = list(blocks)
    wide = ("block",) if width >= WIDE else ()
    text = ("tok/s", "cache") if width >= WIDE and any(block.generating for block in blocks) else ()
    table = _make_table(
        _format_left_out("model", left_out),
        *wide,
        "state",
        "req/s",
        "p50",
        "p99",
        "wait",
        "run",
        "on w",
        "rows",
        "at work",
        *text,
    )
    table.columns[0].max_width = 40 if width >= WIDE else 22
    for block in blocks:
        latency, batches = block.work.latency, block.work.batches
        version = f"[dim]:{escape(block.version)}[/]"
        table.add_row(
            f"{escape(block.model)}{version}", *([block.block_id] if wide else []), _format_state(block.state),
            _show_number(block.work.requests_per_s), _show_ms(latency.p50_ms), _show_ms(latency.p99_ms),
            str(block.waiting), str(block.running), str(block.waiting_on_workers), _show_number(batches.rows_mean),
            _show_share(block.instances.busy_share), *(_format_generation_cells(block.generating) if text else ()),
        )  # fmt: skip
    return table


def _format_generation_cells(found: Generating | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (_show_number(found.tokens_per_s), _format_cache_use(found))


def _make_workers_table(workers: Iterable[LiveWorker], left_out: int, blocks: Sequence[LiveBlock], width: int) -> Table:
    table = _make_table(
        _format_left_out("worker", left_out),
        "state",
        "  memory",
        "busy",
        "idle",
        "at work",
        "batch/s",
        "rows/s",
        "blocks",
    )
    models = {block.block_id: block.model for block in blocks}
    for worker in workers:
        instances = worker.instances
        held = escape(_fit_names([models.get(block, block) for block in worker.blocks], width - WORKER_COLUMNS))
        table.add_row(
            escape(worker.id), _format_state(worker.state), show_size(worker.memory_bytes), str(instances.busy),
            str(instances.idle), _show_share(instances.busy_share), _show_number(worker.batches_per_s),
            _show_number(worker.rows_per_s), held,
        )  # fmt: skip
    table.columns[-1].justify = "left"
    table.columns[-1].max_width = max(10, width - WORKER_COLUMNS)
    return table


def _fit_names(names: Sequence[str], width: int) -> str:
    """Return as many whole names as fit, and the number of names left out."""
    for shown in range(len(names), 0, -1):
        left_out = len(names) - shown
        text = ", ".join(names[:shown]) + (f" +{left_out}" if left_out else "")
        if len(text) <= width:
            return text
    return str(len(names) or "")


def _make_devices_table(view: LiveView, width: int) -> Table:
    table = _make_table("GPU", "  memory", "of", "busy", "workers", "blocks")
    models = {block.block_id: block.model for block in view.blocks}
    for device in view.devices:
        held = ", ".join(
            f"{escape(models.get(block.block_id, block.block_id))} {show_size(block.memory_bytes)} "
            f"{_show_share(block.busy)}"
            for block in device.blocks
        )
        table.add_row(
            escape(device.name), show_size(device.used_bytes), show_size(device.memory_bytes), _show_share(device.busy),
            str(len(device.workers)), held,
        )  # fmt: skip
    table.columns[0].max_width = 22
    table.columns[-1].justify = "left"
    table.columns[-1].max_width = max(10, width - DEVICE_COLUMNS)
    return table


def _format_left_out(name: str, left_out: int) -> str:
    return f"{name} [yellow](+{left_out})[/]" if left_out > 0 else name


def _make_table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for index, head in enumerate(heads):
        # A minimum width, so that columns do not move when their numbers change.
        justify: JustifyMethod = "right" if index else "left"
        table.add_column(
            head, justify=justify, no_wrap=True, overflow="ellipsis", min_width=max(5 if index else 8, len(head))
        )
    return table


def _format_state(state: str) -> str:
    return f"[{STATE_STYLES.get(state, 'red')}]{escape(state)}[/]"


def _show_number(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 0 if value == int(value) else sum(value < bound for bound in (100, 10))
    return f"{value:,.{digits}f}"


def _show_ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.{sum(value < bound for bound in (100, 10, 0.1))}f}"


def _show_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
