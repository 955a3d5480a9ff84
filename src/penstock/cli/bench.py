"""`penstock bench`: load on a running server, and what it made of it."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.options import GRPC_ADDRESS, HTTP_ADDRESS, GrpcAddress, HttpAddress
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.experiments.load.loadtest import LoadStep, LoadTest
    from penstock.experiments.load.payloads import Payload

PROTOCOLS = ("grpc", "stream", "rest")
DEFAULT_CONCURRENCY = "1,8,32,64"
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max")


def bench(
    model: Annotated[str, typer.Argument(help="The model to load.")] = "minilm",
    protocol: Annotated[str, typer.Option(help="grpc, stream (gRPC streams) or rest.")] = "grpc",
    concurrency: Annotated[
        str, typer.Option(metavar="STEPS", help="Callers of a closed loop: 8, 1,8,32 or a ramp like 1:64:*2.")
    ] = "",
    rate: Annotated[
        str, typer.Option(metavar="STEPS", help="Requests a second of an open loop with Poisson arrivals, as steps.")
    ] = "",
    data: Annotated[
        str, typer.Option(help="mixed, queries, passages, pairs, photos, tensor; auto: what fits the model.")
    ] = "auto",
    msmarco: Annotated[Path | None, typer.Option(help="Texts from MS MARCO at this path: TSV or Parquet.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Items in a request.")] = 1,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="NAME:SIZES", help="The shape of a tensor that the model leaves open.")
    ] = None,
    window: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds of a window.")] = 2.0,
    warm_up: Annotated[float, typer.Option(min=0, max=600, help="Seconds of load before the first window.")] = 1.0,
    windows: Annotated[int, typer.Option(min=3, max=1000, help="The most windows of a step.")] = 10,
    processes: Annotated[int, typer.Option(min=0, max=64, help="Of the generator; 0: by the cores.")] = 0,
    grpc: GrpcAddress = GRPC_ADDRESS,
    http: HttpAddress = HTTP_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, histograms included.")] = False,
) -> None:
    """Load a running server in steps. Each ends when three windows in a row agree within 10%."""
    from penstock.experiments.load.loadtest import LoadTest, run_steps
    from penstock.experiments.load.payloads import encode
    from penstock.experiments.load.steps import parse_counts, parse_steps

    if protocol not in PROTOCOLS:
        raise InvalidRequest(f"--protocol {protocol}: there are {', '.join(PROTOCOLS)}")
    if concurrency and rate:
        raise InvalidRequest("--concurrency is of a closed loop, --rate of an open one: give one of them")
    rates = parse_steps(rate, "rate") if rate else []
    callers = [] if rate else parse_counts(concurrency or DEFAULT_CONCURRENCY, "concurrency")
    payloads = _payloads(model, data, batch_size, msmarco, http, shape or [])
    test = LoadTest(
        protocol,
        http.rpartition("://")[2].rstrip("/") if protocol == "rest" else grpc,
        encode(payloads, protocol),
        batch_size,
        callers,
        rates,
        window,
        warm_up,
        windows,
        processes or max(1, (os.cpu_count() or 1) // 4),
    )
    steps = run_steps(test)
    if as_json:
        print(json.dumps({"model": model, "protocol": protocol, "steps": [step.to_json() for step in steps]}, indent=2))
    else:
        _print(test, steps)


def _payloads(
    model: str, data: str, batch_size: int, msmarco: Path | None, http: str, shapes: list[str]
) -> "list[Payload]":
    from penstock.experiments.load.described import describe, random_payload, suitable_data
    from penstock.experiments.load.payloads import TEXTS, build

    kind = data
    if kind in ("auto", "tensor"):
        inputs = describe(http, model)
        kind = suitable_data(inputs) if kind == "auto" else kind
        if kind == "tensor":
            return [random_payload(model, inputs, batch_size, read_shapes(shapes))]
    if msmarco is not None and kind not in TEXTS:
        raise InvalidRequest(f"--msmarco gives texts, and --data {kind} takes none")
    return build(kind, model, batch_size, msmarco)


def read_shapes(given: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for text in given:
        name, _, sizes = text.rpartition(":")
        try:
            found[name] = [int(size) for size in sizes.split(",")]
        except ValueError:
            raise InvalidRequest(f"--shape {text}: expected NAME:SIZES, like x:1,256") from None
        if not name or min(found[name]) < 1:
            raise InvalidRequest(f"--shape {text}: expected NAME:SIZES, like x:1,256")
    return found


def _print(test: "LoadTest", steps: "Iterable[LoadStep]") -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    load = "rate" if test.rates else "callers"
    table = Table(load, "requests/s", "items/s", "±", *(f"{name} ms" for name in PERCENTILES), "generator CPU")
    console = Console(width=None if sys.stdout.isatty() else 140)
    notes: list[str] = []
    with Live(table, console=console, auto_refresh=False) as live:
        for step in steps:
            table.add_row(*_cells(step.to_json()))
            notes += _notes(step)
            live.refresh()
    for note in notes:
        console.print(note, highlight=False)


def _cells(step: dict[str, Any]) -> list[str]:
    load = f"{step['rate']:g}" if step["rate"] else str(step["concurrency"])
    rates = [f"{step['requests_per_s']:.1f}", f"{step['items_per_s']:.1f}", f"{step['spread']:.0%}"]
    latencies = [f"{step['latency_ms'][name]:.2f}" for name in PERCENTILES]
    return [load, *rates, *latencies, f"{step['generator_cpu_share']:.0%} × {step['generator_processes']}"]


def _notes(step: "LoadStep") -> list[str]:
    from penstock.experiments.load.steady import count_refusals

    where = f"at {step.rate:g} a second" if step.rate else f"with {step.concurrency} callers"
    found = []
    if not step.measured.is_steady:
        found.append(f"{where}: no three windows in a row agreed within 10%; the last three are shown")
    if step.measured.rejected:
        found.append(f"{where}: not served: {count_refusals(step.measured.rejected)}")
    if step.is_generator_busy:
        found.append(f"{where}: the generator was busy itself: try more --processes")
    return found
