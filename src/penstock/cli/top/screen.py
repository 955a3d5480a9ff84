"""What `penstock top` draws: fits 80 columns and 24 lines, and uses more where there is more."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime

from rich.console import Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.core.error_text import show_size
from penstock.telemetry.live_view import Generating, Happened, LiveBlock, LiveDevice, LiveView, LiveWorker

FIXED_LINES = 19  # all but the rows of blocks and workers, and what is said of generated text
GENERATING_LINES = 2
DEVICE_LINES = 2  # of their table, which is shown where there is room for it
DEVICE_COLUMNS = 62  # of a device's row, before its blocks
WIDE = 110
WORKER_COLUMNS = 64  # of a worker's row, before the blocks that it holds
BAR_CELLS = 24
SPARKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {"ready": "green", "loading": "yellow", "empty": "yellow", "draining": "yellow"}


class History(deque[LiveView]):
    """The newest is the last."""

    def __init__(self) -> None:
        super().__init__(maxlen=BAR_CELLS)


def screen(http: str, history: History, width: int, height: int | None, trouble: str = "") -> RenderableType:
    """`height` none: as long as it takes. `trouble` says why no events come."""
    if not history:
        return Text(f"reconnecting: {trouble}" if trouble else f"waiting for the first look at {http}", "yellow")
    view = history[-1]
    fixed = FIXED_LINES + (GENERATING_LINES if view.generating is not None else 0)
    fixed += bool(view.devices)
    left = None if height is None else max(2, height - fixed)
    workers = view.workers if left is None else view.workers[: max(1, left - len(view.blocks), left // 3)]
    blocks = view.blocks if left is None else _busiest(view.blocks, left - len(workers))
    phases: RenderableType = _phases(view)
    if width >= WIDE:
        beside = Table.grid(padding=(0, 4))
        beside.add_row(phases, _closed(view), _sparks(history))
        phases = beside
    rows = len(workers) + len(blocks) + DEVICE_LINES + len(view.devices)
    has_room = view.devices and (left is None or rows <= left)
    devices: list[RenderableType] = ["", _devices(view, width)] if has_room else []
    return Group(
        _head(http, view, trouble), *_summary(view, width >= WIDE), "", phases, "",
        _blocks(blocks, len(view.blocks) - len(blocks), width), "",
        _workers(workers, len(view.workers) - len(workers), view.blocks, width),
        *devices,
        "" if height is None else Text("q quits", "dim"),
    )  # fmt: skip


def _head(http: str, view: LiveView, trouble: str) -> RenderableType:
    state = "draining" if view.draining else "ready" if view.ready else "not ready"
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    at = datetime.fromtimestamp(view.at).strftime("%H:%M:%S")
    shown = f"[bold]{escape(view.server)} {escape(view.version)}[/] [{STATE_STYLES.get(state, 'red')}]{state}[/]"
    if trouble:
        line.add_row(f"{shown} [bold red]reconnecting[/] [red]{escape(trouble)}[/]", f"[dim]seen {at}[/]")
    else:
        line.add_row(f"{shown} [dim]{escape(http)}[/]", f"[dim]last {view.seconds:.1f} s, {at}[/]")
    return line


def _summary(view: LiveView, is_wide: bool) -> Iterable[RenderableType]:
    now, batches = view.now, view.work.batches
    codes = "  ".join(f"{escape(code)} {_number(rate)}" for code, rate in view.work.by_code.items())
    yield _line("requests", f"[bold]{_number(view.work.requests_per_s)}[/] /s   {codes}")
    yield _line(
        "inside",
        f"[bold]{now.inflight_requests}[/] in flight ({show_size(now.inflight_bytes)})   waiting {now.waiting}   "
        f"running {now.running}   on workers {now.waiting_on_workers}",
    )
    padding = "" if batches.padding is None else f"   padding x{batches.padding:.2f}"
    yield _line("batches", f"[bold]{_number(batches.per_s)}[/] /s   {_number(batches.rows_mean)} rows{padding}")
    if not is_wide:
        yield _line("closed by", _shares(batches.closed))
    if view.generating is not None:
        yield from _generating(view.generating)
    if view.devices:
        yield _line("GPUs", "   ".join(map(_in_brief, view.devices)))
    troubles = [(each.name.replace("_", " "), getattr(view.troubles, each.name)) for each in fields(view.troubles)]
    yield _line("trouble", "   ".join(f"{name} {_happened(found)}" for name, found in troubles))


def _generating(found: Generating) -> Iterable[RenderableType]:
    cache = f"   cache {_cache(found)} of {found.cache_blocks}" if found.cache_blocks else ""
    yield _line(
        "text",
        f"[bold]{_number(found.tokens_per_s)}[/] tokens/s   {_number(found.request_tokens_per_s)} each   "
        f"running {found.running}   waiting {found.waiting}{cache}",
    )
    first = found.first_token if found.first_token.count else found.engine_first_token  # none is streamed
    between = found.between_tokens if found.between_tokens.count else found.engine_between_tokens
    prefix = "" if found.prefix_hits is None else f"   prefix {found.prefix_hits:.0%}"
    preempted = f"   preempted {_happened({'': found.preemptions})}" if found.preemptions.total else ""
    yield _line(
        "first token",
        f"p50 {_ms(first.p50_ms)}  p99 {_ms(first.p99_ms)} ms   next p50 {_ms(between.p50_ms)}  "
        f"p99 {_ms(between.p99_ms)} ms   prompts {_number(found.prompt_tokens_per_s)}/s{prefix}{preempted}",
    )


def _in_brief(device: LiveDevice) -> str:
    memory = f"{show_size(device.used_bytes)} of {show_size(device.memory_bytes)}"
    return f"[bold]{_share(device.busy)}[/] {memory} {escape(device.name)}"


def _cache(found: Generating) -> str:
    return _share(found.cache_blocks_used / found.cache_blocks if found.cache_blocks else None)


def _line(name: str, markup: str) -> Text:
    line = Text.from_markup(f"[dim]{name:<12}[/]{markup}")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _happened(found: Mapping[str, Happened]) -> str:
    total, new = sum(each.total for each in found.values()), sum(each.count for each in found.values())
    return f"{total} [bold red]+{new}[/]" if new else str(total)


def _shares(rates: Mapping[str, float]) -> str:
    total = sum(rates.values())
    return "  ".join(f"{name} {rate / total:.0%}" for name, rate in rates.items() if rate) or "-"


def _phases(view: LiveView) -> Table:
    table = _table("ms", "mean", "p50", "p95", "p99", "where the time goes")
    longest = max((phase.mean_ms or 0.0 for phase in view.work.phases.values()), default=0.0) or 1.0
    for name, found in (("request", view.work.latency), *view.work.phases.items()):
        figures = [_ms(each) for each in (found.mean_ms, found.p50_ms, found.p95_ms, found.p99_ms)]
        bar = "" if name == "request" else _bar((found.mean_ms or 0.0) / longest)
        table.add_row(f"[bold]{name}[/]" if name == "request" else name, *figures, bar)
    table.columns[-1].justify = "left"
    return table


def _closed(view: LiveView) -> Table:
    table = _table("batch closed by", "/s", "share")
    total = sum(view.work.batches.closed.values()) or 1.0
    for reason, rate in view.work.batches.closed.items():
        table.add_row(escape(reason), _number(rate), _bar(rate / total))
    table.columns[-1].justify = "left"
    return table


def _sparks(history: History) -> Table:
    table = _table("the last looks", "")
    table.add_row("requests /s", _spark([view.work.requests_per_s for view in history]))
    table.add_row("p99", _spark([view.work.latency.p99_ms or 0.0 for view in history]))
    if history[-1].generating is not None:
        table.add_row(
            "tokens /s", _spark([view.generating.tokens_per_s if view.generating else 0.0 for view in history])
        )
    return table


def _spark(values: Sequence[float]) -> str:
    largest = max(values, default=0.0) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, int(value / largest * len(SPARKS)))] for value in values)


def _bar(share: float) -> str:
    return f"[blue]{'━' * round(share * BAR_CELLS)}[/]"


def _busiest(blocks: Sequence[LiveBlock], number: int) -> Sequence[LiveBlock]:
    """All in the server's order, or the `number` of them that get most requests."""
    if len(blocks) <= number:
        return blocks
    return sorted(blocks, key=lambda block: -block.work.requests_per_s)[: max(1, number)]


def _blocks(blocks: Iterable[LiveBlock], left_out: int, width: int) -> Table:
    blocks = list(blocks)
    wide = ("block",) if width >= WIDE else ()
    text = ("tok/s", "cache") if width >= WIDE and any(block.generating for block in blocks) else ()
    table = _table(
        _more("model", left_out), *wide, "state", "req/s", "p50", "p99", "wait", "run", "on w", "rows", "at work", *text
    )
    table.columns[0].max_width = 40 if width >= WIDE else 22
    for block in blocks:
        latency, batches = block.work.latency, block.work.batches
        version = f"[dim]:{escape(block.version)}[/]"
        table.add_row(
            f"{escape(block.model)}{version}", *([block.block_id] if wide else []), _state(block.state),
            _number(block.work.requests_per_s), _ms(latency.p50_ms), _ms(latency.p99_ms), str(block.waiting),
            str(block.running), str(block.waiting_on_workers), _number(batches.rows_mean),
            _share(block.instances.busy_share), *(_text_cells(block.generating) if text else ()),
        )  # fmt: skip
    return table


def _text_cells(found: Generating | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (_number(found.tokens_per_s), _cache(found))


def _workers(workers: Iterable[LiveWorker], left_out: int, blocks: Sequence[LiveBlock], width: int) -> Table:
    table = _table(
        _more("worker", left_out), "state", "  memory", "busy", "idle", "at work", "batch/s", "rows/s", "blocks"
    )
    models = {block.block_id: block.model for block in blocks}
    for worker in workers:
        instances = worker.instances
        held = ", ".join(escape(models.get(block, block)) for block in worker.blocks)
        table.add_row(
            escape(worker.id), _state(worker.state), show_size(worker.memory_bytes), str(instances.busy),
            str(instances.idle), _share(instances.busy_share), _number(worker.batches_per_s),
            _number(worker.rows_per_s), held,
        )  # fmt: skip
    table.columns[-1].justify = "left"
    table.columns[-1].max_width = max(10, width - WORKER_COLUMNS)
    return table


def _devices(view: LiveView, width: int) -> Table:
    """GPUs, and what each block has of them."""
    table = _table("GPU", "  memory", "of", "busy", "workers", "blocks")
    models = {block.block_id: block.model for block in view.blocks}
    for device in view.devices:
        held = ", ".join(
            f"{escape(models.get(block.block_id, block.block_id))} {show_size(block.memory_bytes)} {_share(block.busy)}"
            for block in device.blocks
        )
        table.add_row(
            escape(device.name), show_size(device.used_bytes), show_size(device.memory_bytes), _share(device.busy),
            str(len(device.workers)), held,
        )  # fmt: skip
    table.columns[0].max_width = 22
    table.columns[-1].justify = "left"
    table.columns[-1].max_width = max(10, width - DEVICE_COLUMNS)
    return table


def _more(name: str, left_out: int) -> str:
    return f"{name} [yellow](+{left_out})[/]" if left_out > 0 else name


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for index, head in enumerate(heads):
        # A least width, so that columns do not jump with their figures.
        justify: JustifyMethod = "right" if index else "left"
        table.add_column(
            head, justify=justify, no_wrap=True, overflow="ellipsis", min_width=max(5 if index else 8, len(head))
        )
    return table


def _state(state: str) -> str:
    return f"[{STATE_STYLES.get(state, 'red')}]{escape(state)}[/]"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 0 if value == int(value) else sum(value < bound for bound in (100, 10))
    return f"{value:,.{digits}f}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.{sum(value < bound for bound in (100, 10, 0.1))}f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
