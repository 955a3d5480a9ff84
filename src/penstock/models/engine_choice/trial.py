"""Candidates held against each other in this process, in little time: who is accurate enough, and who is fastest."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.core.errors import PenstockError, message_of
from penstock.core.tensors import from_array
from penstock.models.check.samples import sample_inputs
from penstock.models.convert.fidelity import Reference, rule_of
from penstock.models.convert.samples import Samples, collect
from penstock.models.convert.speed import Turns, take_turns
from penstock.models.engine_choice.candidates import EngineCandidate, TrialVerdict
from penstock.models.loading import LoadedModel, LoadWith
from penstock.models.running import answer
from penstock.models.settings import ModelSettings
from penstock.tasks.base import TaskRequest

SAMPLES = 3  # of each group: queries and passages, or whatever the model takes
# The processor's time, of all threads: what else runs on the machine is no engine's fault, and a worker whose
# instances fill its cores does as much as that time allows.
TURNS = Turns(rounds=2, pass_s=0.1, clock=time.process_time)
CLEARLY = 1.05  # as many times as fast must be what takes the place of the first

SLOWER = 4  # times its bound, by the clock on the wall, where others have the processor or the disk


class EngineTrial:
    def __init__(self, settings: ModelSettings, load: LoadWith, bound_s: float) -> None:
        self._settings = settings
        self._load = load
        self._bound_s = bound_s
        self._begun_s = time.process_time()
        self._ends = time.monotonic() + SLOWER * bound_s

    def run(
        self, candidates: Sequence[EngineCandidate], began: Callable[[EngineCandidate], None]
    ) -> tuple[TrialVerdict, LoadedModel]:
        """The first is taken where there is no time to try others. Raises its error where none can be loaded.

        `began` is told of each candidate before it is loaded: it may end this process.
        """
        found: dict[EngineCandidate, LoadedModel] = {}
        verdict: TrialVerdict | None = None
        try:
            verdict = self._run(candidates, began, found)
        finally:
            for candidate, loaded in found.items():
                if verdict is None or candidate != verdict.chosen:
                    loaded.engine.close()
        return verdict, found[verdict.chosen]

    def _run(
        self,
        candidates: Sequence[EngineCandidate],
        began: Callable[[EngineCandidate], None],
        found: dict[EngineCandidate, LoadedModel],
    ) -> TrialVerdict:
        problems: dict[EngineCandidate, Exception] = {}
        for candidate in candidates:
            begun_s = time.process_time()
            began(candidate)
            try:
                found[candidate] = self._load(candidate.settings(self._settings))
            except Exception as error:  # noqa: BLE001 - a runtime that is not there, or cannot read the file
                problems[candidate] = error
            if found and (self._is_late() or 2 * (time.process_time() - begun_s) > self._left_s()):
                break  # the next one would take as long, and then it has to run
        if not found:
            raise next(iter(problems.values()))
        if len(found) > 1:
            return self._compare(found)
        (chosen,) = found
        if problems:
            said = "; ".join(f"{each.engine} does not load it: {message_of(why)}" for each, why in problems.items())
            return TrialVerdict(chosen, said)
        return self._no_time(chosen, "loading")

    def _compare(self, loaded: dict[EngineCandidate, LoadedModel]) -> TrialVerdict:
        first = next(iter(loaded))
        try:
            samples = _samples(loaded[first])
            request_s = max(_seconds(model, samples.held_out[0][0]) for model in loaded.values())
            if self._is_late() or 8 * SAMPLES * request_s > self._left_s():
                return self._no_time(first, "a request")
            return self._judge(loaded, samples)
        except PenstockError as error:
            return TrialVerdict(first, f"a trial was not possible: {error.message}")

    def _judge(self, loaded: dict[EngineCandidate, LoadedModel], samples: Samples) -> TrialVerdict:
        """Accuracy is held against ONNX Runtime's answers, which computes in what the file is in."""
        settings = self._settings
        rule = rule_of(settings.task)
        floor = rule.floor if settings.min_accuracy is None else settings.min_accuracy
        exact = next(each for each in loaded if each.engine == "onnx")
        reference = Reference(settings.task, loaded[exact], samples)
        fidelities = {each: reference.compare(model) for each, model in loaded.items() if each != exact}
        told = {
            each: f"{found.measure} {found.value:g}{found.unit and f' {found.unit}'}, {floor:g} is asked for"
            for each, found in fidelities.items()
        }
        names = {each: f"{each.engine} in {model.signature.precision}" for each, model in loaded.items()}
        accurate = [each for each in loaded if each == exact or fidelities[each].value >= floor]
        if accurate == [exact]:
            refused = "; ".join(f"{names[each]}: {said}" for each, said in told.items())
            return TrialVerdict(exact, f"no other is accurate enough in a trial ({refused})")
        speeds = take_turns({names[each]: loaded[each] for each in accurate}, _in_turn(samples), turns=TURNS)
        # The best round of each: what else runs on the machine only makes others slower.
        rates = {each: max(speeds[names[each]].rounds) for each in accurate}
        chosen, *others = accurate
        for other in others:
            if rates[other] > CLEARLY * rates[chosen]:
                chosen = other
        faster = [
            f"{rates[chosen] / rate:.2f} times as fast as {names[each]}"
            for each, rate in rates.items()
            if each != chosen
        ]
        accuracy = f"; {told[chosen]}" if chosen in told else ""
        return TrialVerdict(chosen, f"{names[chosen]} is {' and '.join(faster)} in a trial{accuracy}")

    def _no_time(self, first: EngineCandidate, what: str) -> TrialVerdict:
        """What takes too much of the processor's time will do so again; what the machine made late may not."""
        reason = f"{what} takes too long for a trial within {self._bound_s:g} s"
        return TrialVerdict(first, reason, is_tried=not self._is_late())

    def _left_s(self) -> float:
        return self._bound_s - (time.process_time() - self._begun_s)

    def _is_late(self) -> bool:
        return time.monotonic() > self._ends


def _samples(model: LoadedModel) -> Samples:
    """Few enough; of images a small one, since those that conversions learn from take seconds to make."""
    task = model.task
    if any("image" in spec.name for spec in task.signature.inputs):
        inputs = sample_inputs(task.signature.inputs, task.signature.max_batch_size > 0)
        request = TaskRequest([from_array(name, array) for name, array in inputs.items()], [])
        return Samples("", "", (), [[request]])
    found = collect(model.settings.task, task, None)
    return replace(found, held_out=[group[:SAMPLES] for group in found.held_out[:SAMPLES]])


def _in_turn(samples: Samples) -> list[TaskRequest]:
    return [request for group in samples.held_out for request in group]


def _seconds(model: LoadedModel, request: TaskRequest) -> float:
    """Of the second run: the first makes what all later ones use."""
    answer(model, request)
    begun_s = time.process_time()
    answer(model, request)
    return time.process_time() - begun_s
