"""A model's own latency on a device, in this process and without a server: milliseconds a frame, by batch size.

A frame is what a request has one of: an image, a text, a row of a tensor.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from penstock.core.errors import ConfigError, DeviceOutOfMemory, InvalidRequest
from penstock.core.settings import GENERATE
from penstock.engines.base import ContextEngine, EngineHome
from penstock.experiments.tuning.data import TuneData, payloads
from penstock.experiments.variants import settings_problem
from penstock.models.device_meter import DeviceMeter
from penstock.models.folder import ModelFolder
from penstock.models.loading import LoadedModel, ModelFile, load_model
from penstock.models.running import cut, infer_arrays
from penstock.models.settings import ModelSettings
from penstock.tasks.base import Piece, TaskRequest
from penstock.telemetry.devices import open_gpus

FEWEST_RUNS = 3
ANY_SIZE = 2**30


@dataclass(frozen=True, slots=True)
class FrameBench:
    folder: ModelFolder  # of one version
    device: str
    sizes: Sequence[int]
    engine: str = ""  # empty: the model's own, or one that runs on the device
    window_s: float = 2.0
    warm_up_s: float = 0.5
    data: TuneData = field(default_factory=TuneData)
    home: EngineHome | None = None  # where a server's engines are kept


class FrameTimes(NamedTuple):
    """Milliseconds."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class FrameStep:
    batch_size: int  # frames
    rows: int = 0  # of the network: an image may have several tiles
    runs: int = 0
    batch_ms: FrameTimes | None = None  # the engine on all frames
    ms_per_frame: FrameTimes | None = None
    frames_per_s: float = 0.0
    whole_ms_per_frame: FrameTimes | None = None  # with what the task does before and after, in one thread
    problem: str = ""  # why there are no figures

    def to_json(self) -> dict[str, Any]:
        times = ("batch_ms", "ms_per_frame", "whole_ms_per_frame")
        shown = {
            name: found and found._asdict() for name in times if (found := getattr(self, name)) or not self.problem
        }
        return {**{name: value for name, value in asdict(self).items() if name not in times}, **shown}


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """What was loaded, and where."""

    model: str
    version: str
    engine: str
    precision: str
    device: str
    load_s: float
    device_memory_bytes: int  # what loading it took of a GPU; 0: none, or nobody can tell


class FrameRun:
    """Use it as a context: it loads the model, and lets go of it at its end."""

    def __init__(self, bench: FrameBench) -> None:
        self._bench = bench
        self._settings = _settings(bench)
        self._meter = DeviceMeter(open_gpus())
        self._model: LoadedModel | None = None

    def __enter__(self) -> BenchedModel:
        folder, settings = self._bench.folder, self._settings
        version = folder.versions[-1]
        began = time.perf_counter()
        file = ModelFile(folder.file(version), folder.path / version, settings)
        self._model = model = load_model(file, home=self._bench.home)
        if isinstance(model.engine, ContextEngine):
            model.engine.close()
            raise InvalidRequest(
                f"--device: {folder.name} is a model's own code, which is measured as it is served: leave --device out"
            )
        load_s = round(time.perf_counter() - began, 3)
        found = model.signature
        taken = self._meter.taken_bytes(found.device)
        return BenchedModel(folder.name, version, settings.engine, found.precision, found.device, load_s, taken)

    def __exit__(self, *_: object) -> None:
        if self._model is not None:
            self._model.engine.close()

    def steps(self) -> Iterator[FrameStep]:
        """One for each size; a device without memory for one has none for larger ones, which are left out."""
        for size in self._bench.sizes:
            step = self._step(size)
            yield step
            if step.problem:
                return

    def _step(self, size: int) -> FrameStep:
        assert self._model is not None, "use it as a context"
        model, bench = self._model, self._bench
        requests = _requests(bench, model, size)
        pieces = [piece for request in requests for piece in model.task.prepare(request).pieces]
        batches = [model.task.join(batch) for batch in cut(pieces, ANY_SIZE, None)]

        def compute() -> None:
            for batch in batches:
                infer_arrays(model, batch)

        try:
            _timed(compute, bench.warm_up_s, 1)
            runs = _timed(compute, bench.window_s, FEWEST_RUNS)
            whole = _timed(lambda: _serve(model, requests), bench.window_s, 1)
        except DeviceOutOfMemory as error:
            return FrameStep(size, sum(piece.rows for piece in pieces), problem=error.message)
        return FrameStep(
            size,
            sum(piece.rows for piece in pieces),
            len(runs),
            _times(runs),
            _times([seconds / size for seconds in runs]),
            round(size * len(runs) / sum(runs), 2),
            _times([seconds / size for seconds in whole]),
        )


def _settings(bench: FrameBench) -> ModelSettings:
    """Its own, with one instance on the device. OpenVINO's models of ONNX files run elsewhere by ONNX Runtime."""
    own = bench.folder.settings
    if own.task == GENERATE:
        raise InvalidRequest("--device: a model that generates text is measured as it is served: leave --device out")
    given: dict[str, Any] = own.model_dump(mode="json", exclude_unset=True)
    engine = bench.engine
    if not engine and not bench.device.startswith("cpu") and own.engine == "openvino" and own.file.endswith(".onnx"):
        engine = "onnx"
    if engine and engine != own.engine:
        given |= {"engine": engine, "precision": "auto"}
    given["instances"] = {**given.get("instances", {}), "count": 1, "device": bench.device}
    if problem := settings_problem(given):
        raise ConfigError(f"{bench.folder.name}: {problem}")
    return ModelSettings.model_validate(given)


def _requests(bench: FrameBench, model: LoadedModel, size: int) -> list[TaskRequest]:
    specs = model.task.signature.inputs
    inputs = [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]
    found = payloads(bench.data, bench.folder.name, inputs)
    return [TaskRequest(list(payload.inputs), []) for payload in islice(cycle(found), size)]


def _serve(model: LoadedModel, requests: Sequence[TaskRequest]) -> None:
    """From what clients send to what they get, all frames as one batch."""
    task = model.task
    prepared = [task.prepare(request) for request in requests]
    owned = [(number, piece) for number, each in enumerate(prepared) for piece in each.pieces]
    answers: dict[int, Sequence[Any]] = {}
    for batch in cut([piece for _, piece in owned], ANY_SIZE, None):
        outputs = infer_arrays(model, task.join(batch))
        answers |= {id(piece): found for piece, found in zip(batch, task.split(batch, outputs), strict=True)}
    for number, request in enumerate(requests):
        its: list[Piece] = [piece for owner, piece in owned if owner == number]
        task.finish(request, prepared[number], [answers[id(piece)] for piece in its])


def _timed(run: Callable[[], None], seconds: float, fewest: int) -> list[float]:
    """How long each run took, for so many seconds and at least so many times."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < fewest or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return taken


def _times(seconds: Sequence[float]) -> FrameTimes:
    p50, p99 = np.percentile(seconds, (50, 99))
    return FrameTimes(*(round(1000 * float(each), 4) for each in (np.mean(seconds), p50, p99)))
