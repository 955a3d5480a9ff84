"""`penstock bench`: load on a running server, and what it made of it; or a model alone on a device."""

import os
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.frames import SIZES, bench_frames, find_folder
from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.load import (
    BatchSize,
    Goodput,
    LoadProtocol,
    MsMarco,
    OutputTokens,
    PrefixTokens,
    PromptTokens,
    Shapes,
    Streams,
    check_protocol,
    read_shapes,
)
from penstock.cli.terminal.options import GRPC_ADDRESS, HTTP_ADDRESS, GrpcAddress, HttpAddress
from penstock.cli.terminal.output import make_console, print_json
from penstock.cli.terminal.repository import ServedModels
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.experiments.load.loadtest import LoadStep, LoadTest


class Usual(NamedTuple):
    """What is not said."""

    concurrency: tuple[int, ...]
    window_s: float
    warm_up_s: float


OF_TENSORS = Usual((1, 8, 32, 64), 2.0, 1.0)
OF_TEXT = Usual((1, 4, 8, 16), 5.0, 3.0)
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max")
TEXT_PERCENTILES = ("p50", "p90", "p99")


@shows_key
def bench(
    access: Access,
    model: Annotated[str, typer.Argument(help="The model to load.")] = "minilm",
    protocol: LoadProtocol = "grpc",
    concurrency: Annotated[
        str, typer.Option(metavar="STEPS", help="Callers of a closed loop: 8, 1,8,32 or a ramp like 1:64:*2.")
    ] = "",
    rate: Annotated[
        str, typer.Option(metavar="STEPS", help="Requests a second of an open loop with Poisson arrivals, as steps.")
    ] = "",
    data: Annotated[
        str, typer.Option(help="mixed, queries, passages, pairs, photos, tensor, prompts; auto: what fits the model.")
    ] = "auto",
    msmarco: MsMarco = None,
    batch_size: BatchSize = 1,
    shape: Shapes = None,
    prompt_tokens: PromptTokens = "128",
    output_tokens: OutputTokens = "",
    prefix_tokens: PrefixTokens = 0,
    streams: Streams = True,
    goodput: Goodput = "",
    window: Annotated[
        float | None, typer.Option(min=0.1, max=600, help="Seconds of a window: 2, or 5 of generated text.")
    ] = None,
    warm_up: Annotated[
        float | None, typer.Option(min=0, max=600, help="Seconds of load before the first window: 1, or 3 of text.")
    ] = None,
    windows: Annotated[int, typer.Option(min=3, max=1000, help="The most windows of a step.")] = 10,
    processes: Annotated[int, typer.Option(min=0, max=64, help="Of the generator; 0: by the cores.")] = 0,
    grpc: GrpcAddress = GRPC_ADDRESS,
    http: HttpAddress = HTTP_ADDRESS,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="cpu, cuda, cuda:1 or mps: without a server, the model alone in this process, in ms a frame.",
        ),
    ] = "",
    batch_sizes: Annotated[
        str, typer.Option(metavar="STEPS", help="With --device: frames in a batch. [default: 1:32:*2]")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="With --device: another engine than the model's own: onnx, torch, openvino.")
    ] = "",
    models: ServedModels = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, histograms included.")] = False,
) -> None:
    """Load a running server in steps, until three windows in a row agree within 10%; with --device, a model alone."""
    if device:
        if concurrency or rate:
            raise InvalidRequest("--device measures a model without a server: leave out --concurrency and --rate")
        from penstock.core.config import load_config
        from penstock.engines.base import EngineHome
        from penstock.experiments.frames import FrameBench
        from penstock.experiments.load.steps import parse_counts
        from penstock.experiments.tuning.data import TuneData

        sizes = parse_counts(batch_sizes or SIZES, "batch-sizes")
        seconds = (window or OF_TENSORS.window_s, OF_TENSORS.warm_up_s if warm_up is None else warm_up)
        asked_data = TuneData(data, 1, read_shapes(shape))
        config = load_config()
        home = EngineHome(config.data_dir, config.worker.engine_cache_bytes)
        bench_frames(FrameBench(find_folder(model, models), device, sizes, engine, *seconds, asked_data, home), as_json)
        return
    if batch_sizes or engine:
        raise InvalidRequest("--batch-sizes and --engine go with --device")
    from penstock.client.options import read_address
    from penstock.experiments.load.described import AskedLoad, choose_load, describe
    from penstock.experiments.load.loadtest import LoadTest, run_steps
    from penstock.experiments.load.prompts import GenerationShape
    from penstock.experiments.load.steps import parse_counts, parse_steps
    from penstock.wire.credentials.files import TlsFiles

    check_protocol(protocol)
    if concurrency and rate:
        raise InvalidRequest("--concurrency is of a closed loop, --rate of an open one: give one of them")
    rates = parse_steps(rate, "rate") if rate else []
    callers = parse_counts(concurrency, "concurrency") if concurrency else []
    files = (access.cert, access.cert_key, access.ca)
    generation = GenerationShape(prompt_tokens, output_tokens, prefix_tokens)
    asked = AskedLoad(data, batch_size, msmarco, read_shapes(shape), generation, streams, goodput)
    described = partial(describe, access.url(http), model, access.key, TlsFiles(*files))
    load = choose_load(model, asked, protocol, access.key, described)
    usual = OF_TENSORS if load.text is None else OF_TEXT
    target, is_tls = read_address(access.url(http) if protocol == "rest" else grpc)
    test = LoadTest(
        protocol,
        target,
        load.messages,
        load.items,
        callers if callers or rates else usual.concurrency,
        rates,
        window or usual.window_s,
        usual.warm_up_s if warm_up is None else warm_up,
        windows,
        processes or max(1, (os.cpu_count() or 1) // 4),
        access.key,
        files if is_tls or (is_tls is None and access.is_tls) else None,
        load.text,
    )
    steps = run_steps(test)
    if as_json:
        print_json({"model": model, "protocol": protocol, "steps": [step.to_json() for step in steps]})
    else:
        _print(test, steps)


def _print(test: "LoadTest", steps: "Iterable[LoadStep]") -> None:
    from rich.live import Live
    from rich.table import Table

    load = "rate" if test.rates else "callers"
    heads = ["requests/s", "items/s", "±", *(f"{name} ms" for name in PERCENTILES)] if test.text is None else TEXT_HEADS
    table = Table(load, *heads, "generator\nCPU")
    console = make_console()
    notes: list[str] = []
    with Live(table, console=console, auto_refresh=False) as live:
        for step in steps:
            table.add_row(*_cells(step.to_json()))
            notes += _notes(step)
            live.refresh()
    for note in notes:
        console.print(note)


def _cells(step: dict[str, Any]) -> list[str]:
    load = f"{step['rate']:g}" if step["rate"] else str(step["concurrency"])
    cpu = f"{step['generator_cpu_share']:.0%} × {step['generator_processes']}"
    if "generation" in step:
        return [load, *_text_cells(step, step["generation"]), cpu]
    rates = [f"{step['requests_per_s']:.1f}", f"{step['items_per_s']:.1f}", f"{step['spread']:.0%}"]
    latencies = [f"{step['latency_ms'][name]:.2f}" for name in PERCENTILES]
    return [load, *rates, *latencies, cpu]


TEXT_HEADS = (
    *("requests\n/s", "tokens\n/s", "±", "each\n/s", "prompt\ntokens", "answer\ntokens"),
    *(f"{name} ms\np50/90/99" for name in ("first token", "between", "whole")),
    "good\n/s",
)


def _text_cells(step: dict[str, Any], found: dict[str, Any]) -> list[str]:
    def times(summary: dict[str, float] | None) -> str:
        return "-" if summary is None else "/".join(number(summary[name]) for name in TEXT_PERCENTILES)

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.{0 if value >= 100 else 1}f}"

    each = found["request_tokens_per_s"]
    return [
        f"{step['requests_per_s']:.2f}",
        number(found["tokens_per_s"]),
        f"{step['spread']:.0%}",
        number(each and each["p50"]),
        number(found["prompt_tokens_mean"]),
        number(found["output_tokens_mean"]),
        times(found["first_token_ms"]),
        times(found["between_tokens_ms"]),
        times(step["latency_ms"] if found["output_tokens_mean"] is not None else None),
        "-" if found["goodput_per_s"] is None else f"{found['goodput_per_s']:.2f}",
    ]


def _notes(step: "LoadStep") -> list[str]:
    from penstock.experiments.load.steady import count_refusals

    where = f"at {step.rate:g} a second" if step.rate else f"with {step.concurrency} callers"
    found = []
    if not step.measured.is_steady:
        found.append(f"{where}: no three windows in a row agreed within 10%; the last three are shown")
    if step.measured.pace and not step.measured.rps:
        found.append(f"{where}: no answer ended within the windows that are shown: try a longer --window")
    if step.measured.rejected:
        found.append(f"{where}: not served: {count_refusals(step.measured.rejected)}")
    if step.is_generator_busy:
        found.append(f"{where}: the generator was busy itself: try more --processes")
    return found
