"""The descriptions of the built-in tasks. A task's libraries are imported only when a model needs the task."""

from collections.abc import Mapping
from dataclasses import replace

from penstock.core.plugins import PluginKind, load_entry, wrap_factory
from penstock.core.settings import GENERATE
from penstock.core.signature import ImageWork, Signature
from penstock.tasks.base import AnyTask, Task
from penstock.tasks.comparison import (
    AnswerComparison,
    DistributionName,
    compare_embeddings,
    compare_images,
    compare_labels,
    compare_scores,
)
from penstock.tasks.description import TENSOR_ENGINES, Network, RowSize, TaskDescription, TaskFiles, TaskSource
from penstock.tasks.network import has_text_inputs
from penstock.tasks.options import LABELS_FILE, TOKENIZER_FILE, TaskSettings


def _build_tensor(source: TaskSource) -> Task:
    from penstock.tasks.tensor import TensorTask

    # Requests to a Python model are not joined by default: only its code knows the meaning of the first dimension.
    is_batched = False if source.settings.engine == "python" and source.batched is None else source.batched
    return TensorTask(source.signature, source.max_rows, is_batched)


def _build_embed(source: TaskSource) -> Task:
    from penstock.tasks.embed import EmbedTask

    return EmbedTask(source.folder, source.settings.embed, source.signature, source.text_limits)


def _build_score(source: TaskSource) -> Task:
    from penstock.tasks.score import build_score_task

    return build_score_task(source.folder, source.settings.score, source.signature, source.text_limits)


def _build_classify(source: TaskSource) -> Task:
    from penstock.tasks.classify import ClassifyTask, RowLimits

    limits = RowLimits(source.max_rows, source.batched, source.text_limits)
    return ClassifyTask(source.folder, source.settings.classify, limits, source.signature)


def _build_upscale(source: TaskSource) -> Task:
    from penstock.tasks.upscale import UpscaleTask

    return UpscaleTask(source.settings.upscale, source.signature, source.max_rows)


def _build_generate(source: TaskSource) -> AnyTask:
    from penstock.tasks.generate.task import GenerateTask

    return GenerateTask(source.settings.generate, source.signature)


def _always_has_texts(settings: TaskSettings, signature: Signature | None) -> bool:
    return True


def _has_texts_to_classify(settings: TaskSettings, signature: Signature | None) -> bool:
    if settings.classify.input == "auto":
        return signature is not None and settings.engine != "tensorrt" and has_text_inputs(signature)
    return settings.classify.input == "text"


def _classify_files(settings: TaskSettings) -> TaskFiles:
    return TaskFiles(TOKENIZER_FILE if settings.classify.input == "text" else "", LABELS_FILE)


def _upscale_networks(settings: TaskSettings) -> tuple[Network, ...]:
    options = settings.upscale
    enlarging = Network(settings.file, ImageWork(options.scale, options.overlap))
    if not options.denoise:
        return (enlarging,)
    return enlarging, Network(options.denoise, ImageWork(1, options.overlap, is_for_colors=True), "upscale.denoise")


_DESCRIPTIONS = (
    TaskDescription("tensor", _build_tensor, engines=(*TENSOR_ENGINES, "python"), has_real_samples=False),
    TaskDescription(
        "embed",
        _build_embed,
        takes_texts=_always_has_texts,
        row_size=lambda settings: RowSize(tokens=settings.embed.max_length),
        files=lambda settings: TaskFiles(tokenizer=TOKENIZER_FILE),
        experiment_data="pairs",
        comparison=AnswerComparison(
            "mean cosine", 0.98, compare_embeddings, spread=DistributionName("cosine", "cosine", 6), ranks_texts=True
        ),
        example="penstock embed {text} --model {model}",
    ),
    TaskDescription(
        "score",
        _build_score,
        takes_texts=_always_has_texts,
        row_size=lambda settings: RowSize(tokens=settings.score.max_length),
        files=lambda settings: TaskFiles(tokenizer=TOKENIZER_FILE),
        comparison=AnswerComparison("mean rank correlation", 0.95, compare_scores),
    ),
    TaskDescription(
        "classify",
        _build_classify,
        takes_texts=_has_texts_to_classify,
        row_size=lambda settings: RowSize(settings.classify.max_length, settings.classify.size or 0),
        files=_classify_files,
        comparison=AnswerComparison("label agreement", 0.98, compare_labels),
    ),
    TaskDescription(
        "upscale",
        _build_upscale,
        networks=_upscale_networks,
        row_size=lambda settings: RowSize(side=settings.upscale.tile),
        experiment_data="photos",
        comparison=AnswerComparison("mean PSNR", 40.0, compare_images, "dB", DistributionName("psnr_db", "PSNR dB", 2)),
        example="penstock upscale {photo} larger.png --model {model}",
    ),
    TaskDescription(
        GENERATE,
        _build_generate,
        engines=("genai",),
        max_running=lambda settings: settings.generate.max_running,
        experiment_data="prompts",
        sample_parameters={"max_tokens": 16},
        example="penstock generate {text} --model {model}",
    ),
)
BUILT_IN: Mapping[str, TaskDescription] = {each.name: each for each in _DESCRIPTIONS}
TASKS = PluginKind(
    "task",
    tuple(BUILT_IN),
    "penstock.tasks",
    (
        *("signature", "engine_outputs", "prepare", "join", "split", "finish", "warm_up_inputs"),
        *("is_prepare_cheap", "is_finish_cheap"),
    ),
)


def describe_task(name: str) -> TaskDescription:
    """Return a task's description: the real one of a built-in task, default values for a task in a package."""
    return BUILT_IN.get(name) or TaskDescription(name, lambda source: load_description(name).build(source))


def load_description(name: str) -> TaskDescription:
    """Return a task's description; if the task is not built in, import its package.

    The package's entry point is a TaskDescription, or a callable that builds the task. Raises ConfigError if the
    package is missing or broken.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    origin, brought = load_entry(TASKS, name)
    if isinstance(brought, TaskDescription):
        return replace(brought, name=name, build=wrap_factory(TASKS, name, origin, brought.build))
    return TaskDescription(name, wrap_factory(TASKS, name, origin, brought))


def tasks_for_engine(engine: str) -> list[str]:
    """Return the built-in tasks that a built-in engine can run."""
    return [name for name, description in BUILT_IN.items() if engine in description.engines]
