"""`penstock bench`: load-test a running server, or measure a model on a device without a server."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.experiment.device_bench import SIZES, bench_frames, find_folder
from penstock.core.errors import InvalidRequest, Unavailable
from penstock.terminal.load import (
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
from penstock.terminal.output import lay_out, make_console, print_json
from penstock.terminal.progress import print_progress
from penstock.terminal.repository_options import ServedModels
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import read_model_name

if TYPE_CHECKING:
    from penstock.experiments.load.loadtest import LoadStep, LoadTest


class LoadDefaults(NamedTuple):
    """Default values of the options of a load test, which depend on the kind of model."""

    concurrency: tuple[int, ...]
    window_s: float
    warm_up_s: float


TENSOR_DEFAULTS = LoadDefaults((1, 8, 32, 64), 2.0, 1.0)
TEXT_DEFAULTS = LoadDefaults((1, 4, 8, 16), 5.0, 3.0)
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max")
NARROW_PERCENTILES = ("p50", "p95", "p99")  # --json prints all percentiles
WIDE = 110
TEXT_PERCENTILES = ("p50", "p90", "p99")


@takes_server
def bench(
    server: Server,
    model: Annotated[
        str, typer.Argument(help="The model to send requests to: a name, or the path of its folder.")
    ] = "minilm",
    protocol: LoadProtocol = "grpc",
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="STEPS",
            help="Concurrent callers (closed loop): 8, 1,8,32 or a ramp like 1:64:*2. "
            "[default: 1,8,32,64; generated text 1,4,8,16]",
        ),
    ] = "",
    rate: Annotated[
        str,
        typer.Option(
            metavar="STEPS",
            help="Requests per second with Poisson arrivals (open loop): 50, 10,20,40 or 10:80:*2. [default: none]",
        ),
    ] = "",
    data: Annotated[
        str,
        typer.Option(
            metavar="KIND|PATH",
            help="Test data: mixed, queries, passages, pairs, photos, tensor or prompts; or a file with one text per "
            "line, or a folder of images; auto: what fits the model.",
        ),
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
        float | None,
        typer.Option(min=0.1, max=600, help="Length of a measuring window in seconds. [default: 2; generated text 5]"),
    ] = None,
    warm_up: Annotated[
        float | None,
        typer.Option(min=0, max=600, help="Seconds of load before the first window. [default: 1; generated text 3]"),
    ] = None,
    windows: Annotated[int, typer.Option(min=3, max=1000, help="Maximum number of windows per step.")] = 10,
    processes: Annotated[
        int, typer.Option(min=0, max=64, help="Processes of the load generator; 0: one for every four CPU cores.")
    ] = 0,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="Benchmark the model without a server on this device: cpu, cuda, cuda:1 or mps. [default: none]",
        ),
    ] = "",
    batch_sizes: Annotated[
        str, typer.Option(metavar="STEPS", help="With --device: batch sizes to measure. [default: 1:32:*2]")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="With --device: onnx, torch or openvino. [default: the model's own engine]")
    ] = "",
    models: ServedModels = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, including latency histograms.")] = False,
) -> None:
    """Load-test a running server, or a model without a server.

    With --device, the model runs in this process. Each step of load runs until throughput is stable: three windows in
    a row within 10%.
    """
    if device:
        if concurrency or rate:
            raise InvalidRequest("--concurrency and --rate need a server: leave them out, or leave out --device")
        from penstock.core.config import load_config
        from penstock.engines.engine_protocols import EngineHome
        from penstock.experiments.frames import FrameBench
        from penstock.experiments.load.choice import LoadData
        from penstock.experiments.load.steps import parse_counts

        sizes = parse_counts(batch_sizes or SIZES, "batch-sizes")
        seconds = (window or TENSOR_DEFAULTS.window_s, TENSOR_DEFAULTS.warm_up_s if warm_up is None else warm_up)
        test_data = LoadData(data, 1, read_shapes(shape))
        config = load_config()
        home = EngineHome(config.data_dir, config.worker.engine_cache_bytes)
        bench_frames(FrameBench(find_folder(model, models), device, sizes, engine, *seconds, test_data, home), as_json)
        return
    if batch_sizes or engine:
        raise InvalidRequest("--batch-sizes and --engine need --device")
    from penstock.client.client_options import read_address
    from penstock.experiments.load.choice import LoadData, LoadOptions, choose_load, fetch_model_metadata
    from penstock.experiments.load.load_prompts import GenerationShape
    from penstock.experiments.load.loadtest import LoadTest, run_steps
    from penstock.experiments.load.steps import parse_counts, parse_steps
    from penstock.wire.credentials.tls_files import TlsFiles

    check_protocol(protocol)
    model = read_model_name(model) or model
    if concurrency and rate:
        raise InvalidRequest("--concurrency (closed loop) and --rate (open loop) exclude each other: give one of them")
    rates = parse_steps(rate, "rate") if rate else []
    callers = parse_counts(concurrency, "concurrency") if concurrency else []
    access, http = server.access, server.http
    files = (access.cert, access.cert_key, access.ca)
    generation = GenerationShape(prompt_tokens, output_tokens, prefix_tokens)
    load_data = LoadData(data, batch_size, read_shapes(shape), msmarco)
    asked = LoadOptions(load_data, generation, streams, goodput)
    described = partial(fetch_model_metadata, http, model, access.key, TlsFiles(*files))
    load = choose_load(model, asked, protocol, access.key, described)
    defaults = TENSOR_DEFAULTS if load.text is None else TEXT_DEFAULTS
    target, is_tls = read_address(http if protocol == "rest" else server.grpc)
    test = LoadTest(
        protocol,
        target,
        load.messages,
        load.items,
        callers if callers or rates else defaults.concurrency,
        rates,
        window or defaults.window_s,
        defaults.warm_up_s if warm_up is None else warm_up,
        windows,
        processes or max(1, (os.cpu_count() or 1) // 4),
        access.key,
        files if is_tls or (is_tls is None and access.is_tls) else None,
        load.text,
    )
    steps = run_steps(test)
    answered = _report_steps(steps)
    if as_json:
        print_json({"model": model, "protocol": protocol, "steps": [step.to_json() for step in answered]})
    else:
        _print_table(test, answered)


def _report_steps(steps: "Iterable[LoadStep]") -> "Iterator[LoadStep]":
    """Yield the steps, and report each step on standard error unless that is a terminal.

    Raise Unavailable after a step in which every request was refused.
    """
    from penstock.experiments.load.steady import NothingAnswered

    for step in steps:
        found = step.measured
        if not found.pace and found.rejected:
            raise Unavailable(f"{_describe_load(step)}: {NothingAnswered(found.rejected)}; no further load was sent")
        print_progress(f"{_describe_load(step)}: {found.rps:.1f} requests per second")
        yield step


def _describe_load(step: "LoadStep") -> str:
    return (
        f"at {step.rate:g} requests per second"
        if step.rate
        else f"with {step.concurrency} caller{'s' * (step.concurrency > 1)}"
    )


def _print_table(test: "LoadTest", steps: "Iterable[LoadStep]") -> None:
    from rich.live import Live

    console = make_console()
    percentiles = PERCENTILES if console.width >= WIDE else NARROW_PERCENTILES
    load = "rate" if test.rates else "callers"
    heads = ["requests/s", "items/s", "±", *(f"{name} ms" for name in percentiles)] if test.text is None else TEXT_HEADS
    titles, rows, notes = (load, *heads, "generator\nCPU"), list[list[str]](), list[str]()
    with Live(console=console, auto_refresh=False) as live:
        for step in steps:
            rows.append(_format_cells(step.to_json(), percentiles))
            notes += _collect_notes(step)
            live.update(lay_out(console, titles, rows), refresh=True)
    for note in notes:
        console.print(note)


def _format_cells(step: dict[str, Any], percentiles: Sequence[str]) -> list[str]:
    load = f"{step['rate']:g}" if step["rate"] else str(step["concurrency"])
    cpu = f"{step['generator_cpu_share']:.0%} × {step['generator_processes']}"
    if "generation" in step:
        return [load, *_format_text_cells(step, step["generation"]), cpu]
    rates = [f"{step['requests_per_s']:.1f}", f"{step['items_per_s']:.1f}", f"{step['spread']:.0%}"]
    latencies = [f"{step['latency_ms'][name]:.2f}" for name in percentiles]
    return [load, *rates, *latencies, cpu]


TEXT_HEADS = (
    *("requests\n/s", "tokens\n/s", "±", "each\n/s", "prompt\ntokens", "answer\ntokens"),
    *(f"{name} ms\np50/90/99" for name in ("first token", "between", "whole")),
    "good\n/s",
)


def _format_text_cells(step: dict[str, Any], generation: dict[str, Any]) -> list[str]:
    def times(summary: dict[str, float] | None) -> str:
        return "-" if summary is None else "/".join(number(summary[name]) for name in TEXT_PERCENTILES)

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.{0 if value >= 100 else 1}f}"

    each = generation["request_tokens_per_s"]
    return [
        f"{step['requests_per_s']:.2f}",
        number(generation["tokens_per_s"]),
        f"{step['spread']:.0%}",
        number(each and each["p50"]),
        number(generation["prompt_tokens_mean"]),
        number(generation["output_tokens_mean"]),
        times(generation["first_token_ms"]),
        times(generation["between_tokens_ms"]),
        times(step["latency_ms"] if generation["output_tokens_mean"] is not None else None),
        "-" if generation["goodput_per_s"] is None else f"{generation['goodput_per_s']:.2f}",
    ]


def _collect_notes(step: "LoadStep") -> list[str]:
    from penstock.experiments.load.steady import count_refusals

    load, notes = _describe_load(step), []
    if not step.measured.is_steady:
        notes.append(f"{load}: throughput did not stabilise; showing the last 3 windows")
    if step.measured.pace and not step.measured.rps:
        notes.append(f"{load}: no answer was complete within the windows shown: try a longer --window")
    if step.measured.rejected:
        notes.append(f"{load}: not served: {count_refusals(step.measured.rejected)}")
    if step.is_generator_busy:
        notes.append(f"{load}: the load generator ran out of CPU: try more --processes")
    return notes
