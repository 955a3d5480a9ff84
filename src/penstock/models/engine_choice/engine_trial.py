"""Compares candidate engines in this process: accuracy first, then speed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.core.errors import PenstockError, get_message
from penstock.core.tensors import from_array
from penstock.models.check.sample_requests import sample_inputs
from penstock.models.convert.calibration_samples import Samples, collect_samples
from penstock.models.convert.fidelity import Reference
from penstock.models.convert.speed import MeasuringTurns, measure_speeds
from penstock.models.engine_choice.candidates import EngineCandidate, TrialVerdict
from penstock.models.loading import LoadedModel, LoadWith
from penstock.models.model_yaml import ModelSettings
from penstock.models.running import answer
from penstock.tasks.base import TaskRequest
from penstock.tasks.built_in import load_description

SAMPLES = 3  # number of samples per group, and of groups
# Speed is measured in processor time of all threads, which other processes do not affect.
TURNS = MeasuringTurns(rounds=2, pass_s=0.1, clock=time.process_time)
MIN_SPEEDUP = 1.05  # a candidate is chosen instead of an earlier one if it is faster by this factor

WALL_CLOCK_FACTOR = 4  # limit in wall-clock time, as a multiple of the limit in processor time


class EngineTrial:
    """Tries all candidate engines for a model once, with sample requests, and chooses one."""

    def __init__(self, settings: ModelSettings, load: LoadWith, bound_s: float) -> None:
        self._settings = settings
        self._load = load
        self._bound_s = bound_s
        self._started_s = time.process_time()
        self._deadline = time.monotonic() + WALL_CLOCK_FACTOR * bound_s

    def run(
        self, candidates: Sequence[EngineCandidate], report_start: Callable[[EngineCandidate], None]
    ) -> tuple[TrialVerdict, LoadedModel]:
        """Choose a candidate: the first one if time runs out. If no candidate can be loaded, raise the first error.

        `report_start` is called before each candidate is loaded, because loading may crash this process.
        """
        found: dict[EngineCandidate, LoadedModel] = {}
        verdict: TrialVerdict | None = None
        try:
            verdict = self._run(candidates, report_start, found)
        finally:
            for candidate, loaded in found.items():
                if verdict is None or candidate != verdict.chosen:
                    loaded.engine.close()
        return verdict, found[verdict.chosen]

    def _run(
        self,
        candidates: Sequence[EngineCandidate],
        report_start: Callable[[EngineCandidate], None],
        loaded: dict[EngineCandidate, LoadedModel],
    ) -> TrialVerdict:
        problems: dict[EngineCandidate, Exception] = {}
        for candidate in candidates:
            begun_s = time.process_time()
            report_start(candidate)
            try:
                loaded[candidate] = self._load(candidate.settings(self._settings))
            except Exception as error:  # noqa: BLE001 - a runtime may be missing, or may not read the file
                problems[candidate] = error
            if loaded and (self._is_late() or 2 * (time.process_time() - begun_s) > self._left_s()):
                break  # the next one would take as long
        if not loaded:
            raise next(iter(problems.values()))
        if len(loaded) > 1:
            return self._compare(loaded)
        (chosen,) = loaded
        if problems:
            reason = "; ".join(f"{each.engine} does not load it: {get_message(why)}" for each, why in problems.items())
            return TrialVerdict(chosen, reason)
        return self._stop_early(chosen, "loading")

    def _compare(self, loaded: dict[EngineCandidate, LoadedModel]) -> TrialVerdict:
        first = next(iter(loaded))
        try:
            samples = _collect_samples(loaded[first])
            request_s = max(_measure_s(model, samples.held_out[0][0]) for model in loaded.values())
            if self._is_late() or 8 * SAMPLES * request_s > self._left_s():
                return self._stop_early(first, "a request")
            return self._judge(loaded, samples)
        except PenstockError as error:
            return TrialVerdict(first, f"a trial was not possible: {error.message}")

    def _judge(self, loaded: dict[EngineCandidate, LoadedModel], samples: Samples) -> TrialVerdict:
        """Return the fastest of the candidates whose answers are similar enough to those of ONNX Runtime."""
        settings = self._settings
        default = load_description(settings.task).comparison.floor
        floor = default if settings.min_accuracy is None else settings.min_accuracy
        exact = next(each for each in loaded if each.engine == "onnx")
        reference = Reference(settings.task, loaded[exact], samples)
        fidelities = {each: reference.compare(model) for each, model in loaded.items() if each != exact}
        accuracies = {
            each: f"{found.measure} {found.value:g}{found.unit and f' {found.unit}'}, the minimum is {floor:g}"
            for each, found in fidelities.items()
        }
        names = {each: f"{each.engine} in {model.signature.precision}" for each, model in loaded.items()}
        accurate = [each for each in loaded if each == exact or fidelities[each].value >= floor]
        if accurate == [exact]:
            refused = "; ".join(f"{names[each]}: {accuracy}" for each, accuracy in accuracies.items())
            return TrialVerdict(exact, f"no other engine is accurate enough in a trial ({refused})")
        speeds = measure_speeds({names[each]: loaded[each] for each in accurate}, _flatten(samples), turns=TURNS)
        # The fastest round of each counts, because other processes can only make rounds slower.
        rates = {each: max(speeds[names[each]].rounds) for each in accurate}
        chosen, *others = accurate
        for other in others:
            if rates[other] > MIN_SPEEDUP * rates[chosen]:
                chosen = other
        faster = [
            f"{rates[chosen] / rate:.2f} times as fast as {names[each]}"
            for each, rate in rates.items()
            if each != chosen
        ]
        accuracy = f"; {accuracies[chosen]}" if chosen in accuracies else ""
        return TrialVerdict(chosen, f"{names[chosen]} is {' and '.join(faster)} in a trial{accuracy}")

    def _stop_early(self, candidate: EngineCandidate, activity: str) -> TrialVerdict:
        """Return a verdict for the first candidate, because a trial of all candidates would take too long.

        If the machine is busy, the verdict says that no trial was made, so that it is not stored.
        """
        reason = f"{activity} takes too long for a trial within {self._bound_s:g} s"
        return TrialVerdict(candidate, reason, is_tried=not self._is_late())

    def _left_s(self) -> float:
        return self._bound_s - (time.process_time() - self._started_s)

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline


def _collect_samples(model: LoadedModel) -> Samples:
    """Return a few sample requests. Images are small, because larger images take seconds to prepare."""
    task = model.task
    if any("image" in spec.name for spec in task.signature.inputs):
        inputs = sample_inputs(task.signature.inputs, task.signature.max_batch_size > 0)
        request = TaskRequest([from_array(name, array) for name, array in inputs.items()], [])
        return Samples("", "", (), [[request]])
    found = collect_samples(model.settings.task, task, None)
    return replace(found, held_out=[group[:SAMPLES] for group in found.held_out[:SAMPLES]])


def _flatten(samples: Samples) -> list[TaskRequest]:
    return [request for group in samples.held_out for request in group]


def _measure_s(model: LoadedModel, request: TaskRequest) -> float:
    """Return the seconds that the second run of a request takes; the first run includes one-time work."""
    answer(model, request)
    begun_s = time.process_time()
    answer(model, request)
    return time.process_time() - begun_s
