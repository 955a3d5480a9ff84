"""The throughput of each `placement`: the same models with each of them, in turns in one run."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from onnx import TensorProto, helper

from benchmarks.repository import link_model, write_network
from benchmarks.server import ServerProcess
from benchmarks.suite.echo import EchoRun
from benchmarks.suite.figures import SuiteFigure, ratio
from benchmarks.suite.measure import Bench, LoadRow, TableLoad
from penstock.models.samples.noop import NOOP, write_noop

INLINE = "inline"
POOL = "pool"
PLACEMENTS = (INLINE, POOL)
SETTINGS = {"worker": {"task_processes": 1}}
NEIGHBOUR = "neighbour"
COPY = "copy"  # an upscaling model with an empty network: only preparing and finishing take time
# Name, model, kind of payload, callers.
LOADS = (
    ("photos", "srcnn", "photos", 8),
    ("photos-copy", COPY, "photos", 8),
    ("texts", "minilm", "mixed", 64),
    ("queries", "minilm", "queries", 64),
)


def measure_placements(
    models: Path, rounds: int, window_s: float, warm_up_s: float
) -> tuple[list[SuiteFigure], dict[str, LoadRow]]:
    """Return requests per second of each placement divided by those of `inline`; `models` is the shipped repository."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        repository = _build_repository(models, folder, PLACEMENTS)
        write_noop(repository / NOOP)
        with ServerProcess(repository, folder, settings=SETTINGS) as server, EchoRun() as echo:
            bench = Bench(server, echo.target, folder, warm_up_s, window_s)
            for load, model, kind, callers in LOADS:
                bench.rounds(
                    [
                        TableLoad(f"{load} {placement}", "grpc", kind, f"{model}-{placement}", callers)
                        for placement in PLACEMENTS
                    ],
                    rounds,
                )
            bench.rounds_beside([_list_neighbour_loads(placement) for placement in PLACEMENTS], rounds)
    rows = bench.rows
    figures = [
        ratio(f"{load}_{POOL}_over_inline", rows[f"{load} {POOL}"].rps, rows[f"{load} {INLINE}"].rps, 0.0)
        for load, *_ in LOADS
    ]
    p99 = {place: [found[99] for found in rows[f"{NEIGHBOUR} {place}"].percentiles_ms] for place in PLACEMENTS}
    return [*figures, ratio(f"{NEIGHBOUR}_p99_{POOL}_over_inline", p99[POOL], p99[INLINE], 0.0)], rows


def _list_neighbour_loads(placement: str) -> tuple[TableLoad, TableLoad]:
    """Measure a no-op on the worker that prepares photographs, together with the photographs."""
    photos = TableLoad(f"photos beside {placement}", "grpc", "photos", f"{COPY}-{placement}", 4)
    return TableLoad(f"{NEIGHBOUR} {placement}", "rest", "noop", NOOP, 1), photos


def _build_repository(models: Path, folder: Path, placements: Sequence[str]) -> Path:
    _write_copy(folder / COPY)
    repository = folder / "models"
    for model in dict.fromkeys(model for _, model, *_ in LOADS):
        source = folder / COPY if model == COPY else models / model
        for placement in placements:
            link_model(source, repository / f"{model}-{placement}", placement=placement)
    return repository


def _write_copy(folder: Path) -> None:
    shape: list[str | int | None] = ["n", 1, "height", "width"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        COPY,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    write_network(folder, graph, task="upscale", batching={"max_rows": 8, "max_tokens": 1})
