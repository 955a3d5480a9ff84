"""What `engine: auto` becomes in a worker: as remembered, as a trial finds, or as the processor's features say."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.models.engine_choice.candidates import (
    EngineCandidate,
    EngineChoice,
    TrialVerdict,
    choice_of,
    find_candidates,
    takes_gpu,
)
from penstock.models.engine_choice.memory import ChoiceMemory, KeptChoice
from penstock.models.loading import LoadedModel, LoadWith, ModelFile
from penstock.models.settings import ModelSettings
from penstock.telemetry.control_groups import usable_cores
from penstock.telemetry.machine import installed_version, processor, processor_features

FOLDER = "engine-choices"  # in the data directory
RECIPE = "1"  # counts up when trials are made in another way
WAITS = 5  # times a trial's bound, what another process gets to end its own
COUNTED = ("avx", "amx", "fma", "sse4", "asimd", "sve", "bf16", "i8mm")  # features that engines have code for
LIBRARIES = ("onnxruntime", "onnxruntime-gpu", "openvino")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineChooser:
    """One of a worker; workers that share a data directory try a model once."""

    data_dir: Path
    trial_s: float  # 0: the processor's features decide alone

    def choose(self, model: ModelFile, fingerprint: str, load: LoadWith) -> tuple[EngineChoice, LoadedModel | None]:
        """Blocks for as long as a trial takes, here or in another worker. Raises what is wrong where none loads it."""
        settings, features = model.settings, processor_features()
        found = find_candidates(settings, features, takes_gpu(settings))
        first = TrialVerdict(found.ordered[0], found.reason)
        if len(found.ordered) == 1 or not self.trial_s:
            return choice_of(first, settings), None
        run = _Run(settings, load, self.trial_s, found.ordered)
        memory, key = ChoiceMemory(self.data_dir / FOLDER), _key(model, fingerprint, features)
        try:
            with memory.turn(key, WAITS * self.trial_s) as kept:
                verdict, loaded = run.once(kept)
        except TimeoutError as error:
            verdict, loaded = TrialVerdict(first.chosen, f"{found.reason}; {error}"), None
        except OSError as error:
            verdict, loaded = run.now()
            verdict = verdict._replace(reason=f"{verdict.reason}; it cannot be remembered: {error.strerror or error}")
        if loaded is not None:
            name = model.folder.parent.name
            log.info("engine_chosen", model=name, engine=verdict.chosen.engine, reason=verdict.reason)
        return choice_of(verdict, settings), loaded


@dataclass(frozen=True, slots=True)
class _Run:
    settings: ModelSettings
    load: LoadWith
    bound_s: float
    candidates: Sequence[EngineCandidate]

    def once(self, kept: KeptChoice) -> tuple[TrialVerdict, LoadedModel | None]:
        if (known := kept.verdict) is not None and known.chosen in self.candidates:
            return known, None
        living = [each for each in self.candidates if not kept.is_deadly(each)]
        loaded: LoadedModel | None = None
        if len(living) < len(self.candidates):
            verdict = TrialVerdict(living[0], "the other engine has ended workers that tried it")
        else:
            try:
                verdict, loaded = self.now(kept.began)
            except BaseException:
                kept.forget()  # this process lives
                raise
        kept.keep(verdict)
        return verdict, loaded

    def now(self, began: Callable[[EngineCandidate], None] = lambda _: None) -> tuple[TrialVerdict, LoadedModel]:
        from penstock.models.engine_choice.trial import EngineTrial  # with all that samples are made of

        return EngineTrial(self.settings, self.load, self.bound_s).run(self.candidates, began)


def _key(model: ModelFile, fingerprint: str, features: Collection[str]) -> dict[str, str]:
    """All that a trial's outcome hangs on."""
    settings = model.settings
    return {
        "recipe": RECIPE,
        "model": fingerprint,
        "processor": processor(),
        "features": " ".join(sorted(each for each in features if each.startswith(COUNTED))),
        "cores": str(usable_cores()),
        "instances": f"{settings.instance_count()} x {settings.instances.threads}",
        **{name: version for name in LIBRARIES if (version := installed_version(name))},
    }
