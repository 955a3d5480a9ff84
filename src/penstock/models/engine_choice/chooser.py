"""Chooses the engine for `engine: auto` in a worker, from a stored result, a trial, or the processor's features."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.models.engine_choice.candidates import (
    EngineCandidate,
    EngineChoice,
    TrialVerdict,
    find_candidates,
    make_choice,
    would_use_gpu,
)
from penstock.models.engine_choice.memory import ChoiceMemory, StoredChoice
from penstock.models.loading import LoadedModel, LoadWith, ModelFile
from penstock.models.model_yaml import ModelSettings
from penstock.telemetry.control_groups import count_usable_cores
from penstock.telemetry.machine import find_installed_version, read_processor_features, read_processor_name

FOLDER = "engine-choices"  # in the data directory
RECIPE = "1"  # increase this number when trials change
WAIT_FACTOR = 5  # how long to wait for another process's trial, as a multiple of a trial's time limit
ENGINE_FEATURES = ("avx", "amx", "fma", "sse4", "asimd", "sve", "bf16", "i8mm")  # processor features that engines use
LIBRARIES = ("onnxruntime", "onnxruntime-gpu", "openvino")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineChooser:
    """Chooses engines for one worker. Workers that share a data directory try each model only once."""

    data_dir: Path
    trial_s: float  # time limit of a trial; 0: no trials

    def choose(self, model: ModelFile, fingerprint: str, load: LoadWith) -> tuple[EngineChoice, LoadedModel | None]:
        """Choose an engine from the stored result, or from a trial; raise an error if no engine works.

        If another worker is trying the engines for this model, wait for its result.
        """
        settings, features = model.settings, read_processor_features()
        found = find_candidates(settings, features, would_use_gpu(settings))
        first = TrialVerdict(found.ordered[0], found.reason)
        if len(found.ordered) == 1 or not self.trial_s:
            return make_choice(first, settings), None
        run = _ChoiceRun(settings, load, self.trial_s, found.ordered)
        memory, key = ChoiceMemory(self.data_dir / FOLDER), _trial_key(model, fingerprint, features)
        try:
            with memory.hold_record(key, WAIT_FACTOR * self.trial_s) as kept:
                verdict, loaded = run.use_stored_or_try(kept)
        except TimeoutError as error:
            verdict, loaded = TrialVerdict(first.chosen, f"{found.reason}; {error}"), None
        except OSError as error:
            verdict, loaded = run.try_candidates()
            verdict = verdict._replace(
                reason=f"{verdict.reason}; the result cannot be stored: {error.strerror or error}"
            )
        if loaded is not None:
            name = model.folder.parent.name
            log.info("engine_chosen", model=name, engine=verdict.chosen.engine, reason=verdict.reason)
        return make_choice(verdict, settings), loaded


@dataclass(frozen=True, slots=True)
class _ChoiceRun:
    settings: ModelSettings
    load: LoadWith
    bound_s: float
    candidates: Sequence[EngineCandidate]

    def use_stored_or_try(self, stored: StoredChoice) -> tuple[TrialVerdict, LoadedModel | None]:
        if (known := stored.verdict) is not None and known.chosen in self.candidates:
            return known, None
        living = [each for each in self.candidates if not stored.is_deadly(each)]
        loaded: LoadedModel | None = None
        if len(living) < len(self.candidates):
            verdict = TrialVerdict(living[0], "the other engine has crashed workers that tried it")
        else:
            try:
                verdict, loaded = self.try_candidates(stored.record_start)
            except BaseException:
                stored.forget()  # this process has survived the trial
                raise
        stored.keep(verdict)
        return verdict, loaded

    def try_candidates(
        self, report_start: Callable[[EngineCandidate], None] = lambda _: None
    ) -> tuple[TrialVerdict, LoadedModel]:
        from penstock.models.engine_choice.engine_trial import EngineTrial  # imports the libraries of samples

        return EngineTrial(self.settings, self.load, self.bound_s).run(self.candidates, report_start)


def _trial_key(model: ModelFile, fingerprint: str, features: Collection[str]) -> dict[str, str]:
    """Return the properties of the model and of the machine that affect a trial's result."""
    settings = model.settings
    return {
        "recipe": RECIPE,
        "model": fingerprint,
        "processor": read_processor_name(),
        "features": " ".join(sorted(each for each in features if each.startswith(ENGINE_FEATURES))),
        "cores": str(count_usable_cores()),
        "instances": f"{settings.instance_count()} x {settings.instances.threads}",
        **{name: version for name in LIBRARIES if (version := find_installed_version(name))},
    }
