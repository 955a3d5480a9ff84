"""`penstock bench`: load on a running server, and what it made of it."""

import os
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.load import BatchSize, LoadProtocol, MsMarco, Shapes, check_protocol, read_shapes
from penstock.cli.terminal.options import GRPC_ADDRESS, HTTP_ADDRESS, GrpcAddress, HttpAddress
from penstock.cli.terminal.output import make_console, print_json
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.experiments.load.loadtest import LoadStep, LoadTest

DEFAULT_CONCURRENCY = "1,8,32,64"
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max")


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
        str, typer.Option(help="mixed, queries, passages, pairs, photos, tensor; auto: what fits the model.")
    ] = "auto",
    msmarco: MsMarco = None,
    batch_size: BatchSize = 1,
    shape: Shapes = None,
    window: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds of a window.")] = 2.0,
    warm_up: Annotated[float, typer.Option(min=0, max=600, help="Seconds of load before the first window.")] = 1.0,
    windows: Annotated[int, typer.Option(min=3, max=1000, help="The most windows of a step.")] = 10,
    processes: Annotated[int, typer.Option(min=0, max=64, help="Of the generator; 0: by the cores.")] = 0,
    grpc: GrpcAddress = GRPC_ADDRESS,
    http: HttpAddress = HTTP_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, histograms included.")] = False,
) -> None:
    """Load a running server in steps. Each ends when three windows in a row agree within 10%."""
    from penstock.client.options import read_address
    from penstock.experiments.load.described import choose_payloads, describe
    from penstock.experiments.load.loadtest import LoadTest, run_steps
    from penstock.experiments.load.payloads import encode
    from penstock.experiments.load.steps import parse_counts, parse_steps
    from penstock.wire.credentials.files import TlsFiles

    check_protocol(protocol)
    if concurrency and rate:
        raise InvalidRequest("--concurrency is of a closed loop, --rate of an open one: give one of them")
    rates = parse_steps(rate, "rate") if rate else []
    callers = [] if rate else parse_counts(concurrency or DEFAULT_CONCURRENCY, "concurrency")
    files = (access.cert, access.cert_key, access.ca)
    described = partial(describe, access.url(http), model, access.key, TlsFiles(*files))
    payloads = choose_payloads(model, data, batch_size, msmarco, described, read_shapes(shape))
    target, is_tls = read_address(access.url(http) if protocol == "rest" else grpc)
    test = LoadTest(
        protocol,
        target,
        encode(payloads, protocol, access.key),
        batch_size,
        callers,
        rates,
        window,
        warm_up,
        windows,
        processes or max(1, (os.cpu_count() or 1) // 4),
        access.key,
        files if is_tls or (is_tls is None and access.is_tls) else None,
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
    table = Table(load, "requests/s", "items/s", "±", *(f"{name} ms" for name in PERCENTILES), "generator CPU")
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
