"""How a model's settings fit this machine and each other, where they are allowed and yet may not be meant."""

from collections.abc import Iterator, Mapping

from penstock.models.check.findings import Finding, warning
from penstock.models.settings import ModelSettings
from penstock.telemetry.control_groups import usable_cores

TASK_SECTIONS = ("embed", "score", "classify", "upscale")
ENGINE_SECTIONS = ("python", "torch", "tensorrt")


def examine_fit(settings: ModelSettings) -> list[Finding]:
    return [*_threads(settings), *_tokens(settings), *_unused(settings), *_placement(settings)]


def examine_precision(settings: ModelSettings, facts: Mapping[str, object]) -> list[Finding]:
    """Holds the precision that was asked for against the one that the loaded model runs in."""
    asked, runs = settings.precision, facts.get("precision")
    if asked == "auto" or runs in (None, asked, "custom"):
        return []
    message = f"precision: {asked} is asked for, and the model runs in {runs}"
    advice = "Say precision: auto; with engine: onnx the file decides, and docs/quantization.md makes others."
    return [warning("precision_differs", message, advice)]


def _threads(settings: ModelSettings) -> Iterator[Finding]:
    cores = usable_cores()
    instances = settings.instances
    count = settings.instance_count()
    if instances.device in ("cpu", "auto") and count * instances.threads > cores:
        message = (
            f"{count} instance{'s' if count > 1 else ''} of {instances.threads} "
            f"thread{'s' if instances.threads > 1 else ''} are more than this machine's {cores} cores"
        )
        advice = "They would take the cores from each other: let instances.count be auto; penstock tune finds the best."
        yield warning("too_many_threads", message, advice)


def _tokens(settings: ModelSettings) -> Iterator[Finding]:
    longest = {"embed": settings.embed.max_length, "score": settings.score.max_length}.get(settings.task)
    budget = settings.batching.max_tokens
    if longest is not None and budget is not None and budget < longest:
        message = f"batching.max_tokens {budget} is less than {settings.task}.max_length {longest}"
        advice = "A longer text then is a batch by itself, however many wait: raise max_tokens, or lower max_length."
        yield warning("low_token_budget", message, advice)


def _unused(settings: ModelSettings) -> Iterator[Finding]:
    given = settings.model_fields_set
    for sections, key, value in ((TASK_SECTIONS, "task", settings.task), (ENGINE_SECTIONS, "engine", settings.engine)):
        for section in sections:
            if section in given and section != value:
                message = f"the section {section}: has no effect with {key}: {value}"
                yield warning("unused_settings", message, f"Take it out, or say {key}: {section}.")


def _placement(settings: ModelSettings) -> Iterator[Finding]:
    if settings.placement == "worker":
        message = "placement: worker needs task workers, and a server has none unless it is told"
        yield warning("needs_task_workers", message, "Serve it with PENSTOCK_WORKER__TASK_WORKERS=1 or more.")
