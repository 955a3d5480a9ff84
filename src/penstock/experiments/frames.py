"""Measure a model's latency per frame and batch size on a device, in this process and without a server.

A frame is one item of a request: an image, a text or a row of a tensor.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from penstock.core.errors import ConfigError, DeviceOutOfMemory, InvalidRequest
from penstock.engines.engine_protocols import EngineHome
from penstock.experiments.load.choice import LoadData, build_payloads
from penstock.experiments.variants import find_settings_problem
from penstock.models.device_meter import DeviceMeter
from penstock.models.folder import ModelFolder
from penstock.models.loading import LoadedModel, ModelFile, load_model
from penstock.models.model_yaml import ModelSettings
from penstock.models.running import cut_into_batches, infer_arrays, join
from penstock.tasks.base import Piece, TaskRequest
from penstock.tasks.built_in import describe_task
from penstock.telemetry.gpus import open_gpus

MIN_RUNS = 3
ANY_SIZE = 2**30


@dataclass(frozen=True, slots=True)
class FrameBench:
    """The options of a measurement of latency per frame."""

    folder: ModelFolder  # a folder with one version
    device: str
    sizes: Sequence[int]
    engine: str = ""  # empty: the model's own engine, or one that supports the device
    window_s: float = 2.0
    warm_up_s: float = 0.5
    data: LoadData = field(default_factory=LoadData)
    home: EngineHome | None = None  # the folder in which a server stores built engines


class FrameTimes(NamedTuple):
    """A distribution of times in milliseconds."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class FrameStep:
    batch_size: int  # frames per batch
    rows: int = 0  # rows of the network's input: an image may have several tiles
    runs: int = 0
    batch_ms: FrameTimes | None = None  # time of the engine for the batch
    ms_per_frame: FrameTimes | None = None
    frames_per_s: float = 0.0
    whole_ms_per_frame: FrameTimes | None = None  # including the task's pre- and post-processing, in one thread
    problem: str = ""  # the reason if there are no figures

    def to_json(self) -> dict[str, Any]:
        times = ("batch_ms", "ms_per_frame", "whole_ms_per_frame")
        shown = {
            name: found and found._asdict() for name in times if (found := getattr(self, name)) or not self.problem
        }
        return {**{name: value for name, value in asdict(self).items() if name not in times}, **shown}


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """A loaded model, and the device on which the model is measured."""

    model: str
    version: str
    engine: str
    precision: str
    device: str
    load_s: float
    device_memory_bytes: int  # GPU memory that loading took; 0: none, or unknown


class FrameRun:
    """A context manager that loads the model on entry and unloads it on exit."""

    def __init__(self, bench: FrameBench) -> None:
        self._bench = bench
        self._settings = _read_settings(bench)
        self._meter = DeviceMeter(open_gpus())
        self._model: LoadedModel | None = None

    def __enter__(self) -> BenchedModel:
        folder, settings = self._bench.folder, self._settings
        version = folder.versions[-1]
        began = time.perf_counter()
        file = ModelFile(folder.file(version), folder.path / version, settings)
        self._model = model = load_model(file, home=self._bench.home)
        if model.request_mode == "calls":
            model.engine.close()
            raise InvalidRequest(
                f"--device: {folder.name} runs its own Python code and can only be measured with a server: leave out "
                "--device"
            )
        load_s = round(time.perf_counter() - began, 3)
        found = model.signature
        taken = self._meter.taken_bytes(found.device)
        return BenchedModel(folder.name, version, settings.engine, found.precision, found.device, load_s, taken)

    def __exit__(self, *_: object) -> None:
        if self._model is not None:
            self._model.engine.close()

    def steps(self) -> Iterator[FrameStep]:
        """Measure one batch size after another; stop when the device has no memory for a size."""
        for size in self._bench.sizes:
            step = self._measure_size(size)
            yield step
            if step.problem:
                return

    def _measure_size(self, size: int) -> FrameStep:
        assert self._model is not None, "use FrameRun as a context manager"
        model, bench = self._model, self._bench
        requests = _build_requests(bench, model, size)
        pieces = [piece for request in requests for piece in model.task.prepare(request).pieces]
        batches = [join(model, batch) for batch in cut_into_batches(pieces, ANY_SIZE, None)]

        def compute() -> None:
            for batch in batches:
                infer_arrays(model, batch)

        try:
            _time_runs(compute, bench.warm_up_s, 1)
            runs = _time_runs(compute, bench.window_s, MIN_RUNS)
            whole = _time_runs(lambda: _run_batch(model, requests), bench.window_s, 1)
        except DeviceOutOfMemory as error:
            return FrameStep(size, sum(piece.rows for piece in pieces), problem=error.message)
        return FrameStep(
            size,
            sum(piece.rows for piece in pieces),
            len(runs),
            _summarize(runs),
            _summarize([seconds / size for seconds in runs]),
            round(size * len(runs) / sum(runs), 2),
            _summarize([seconds / size for seconds in whole]),
        )


def _read_settings(bench: FrameBench) -> ModelSettings:
    """Return the model's settings, changed to one instance on the device.

    OpenVINO supports only CPUs, so models with ONNX files for OpenVINO run with ONNX Runtime on other devices.
    """
    own = bench.folder.settings
    if describe_task(own.task).max_running:
        raise InvalidRequest(
            "--device: a model that generates text can only be measured with a server: leave out --device"
        )
    given: dict[str, Any] = own.model_dump(mode="json", exclude_unset=True)
    engine = bench.engine
    if not engine and not bench.device.startswith("cpu") and own.engine == "openvino" and own.file.endswith(".onnx"):
        engine = "onnx"
    if engine and engine != own.engine:
        given |= {"engine": engine, "precision": "auto"}
    given["instances"] = {**given.get("instances", {}), "count": 1, "device": bench.device}
    if problem := find_settings_problem(given):
        raise ConfigError(f"{bench.folder.name}: {problem}")
    return ModelSettings.model_validate(given)


def _build_requests(bench: FrameBench, model: LoadedModel, size: int) -> list[TaskRequest]:
    specs = model.task.signature.inputs
    inputs = [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]
    found = build_payloads(bench.data, bench.folder.name, inputs)
    return [TaskRequest(list(payload.inputs), []) for payload in islice(cycle(found), size)]


def _run_batch(model: LoadedModel, requests: Sequence[TaskRequest]) -> None:
    """Run pre-processing, the engine and post-processing, with all frames in one batch."""
    task, _ = model.batching
    prepared = [task.prepare(request) for request in requests]
    owned = [(number, piece) for number, each in enumerate(prepared) for piece in each.pieces]
    answers: dict[int, Sequence[Any]] = {}
    for batch in cut_into_batches([piece for _, piece in owned], ANY_SIZE, None):
        outputs = infer_arrays(model, task.join(batch))
        answers |= {id(piece): found for piece, found in zip(batch, task.split(batch, outputs), strict=True)}
    for number, request in enumerate(requests):
        pieces: list[Piece] = [piece for owner, piece in owned if owner == number]
        task.finish(request, prepared[number], [answers[id(piece)] for piece in pieces])


def _time_runs(run: Callable[[], None], seconds: float, min_runs: int) -> list[float]:
    """Call `run` repeatedly for `seconds`, at least `min_runs` times, and return the duration of each call."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < min_runs or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return taken


def _summarize(seconds: Sequence[float]) -> FrameTimes:
    p50, p99 = np.percentile(seconds, (50, 99))
    return FrameTimes(*(round(1000 * float(each), 4) for each in (np.mean(seconds), p50, p99)))
