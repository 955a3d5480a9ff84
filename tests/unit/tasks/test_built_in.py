"""The descriptions of tasks: the built-in table, and the rules that model.yaml gets from it."""

import pytest

from penstock.core.errors import ConfigError
from penstock.core.signature import ImageWork
from penstock.core.yaml_file import ConflictingValues
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.built_in import BUILT_IN, describe_task, load_description, tasks_for_engine
from penstock.tasks.description import Network, RowSize, TaskFiles


def test_every_built_in_task_has_a_default_floor() -> None:
    floors = {name: description.comparison.floor for name, description in BUILT_IN.items()}
    assert floors == {"tensor": 0.98, "embed": 0.98, "score": 0.95, "classify": 0.98, "upscale": 40.0, "generate": 0.98}


def test_every_section_of_a_task_belongs_to_a_built_in_task() -> None:
    sections = {name for name in BUILT_IN if name in ModelSettings.model_fields}
    assert sections == set(BUILT_IN) - {"tensor"}


def test_tasks_of_an_engine_are_listed() -> None:
    assert tasks_for_engine("genai") == ["generate"]
    assert tasks_for_engine("python") == ["tensor"]
    assert tasks_for_engine("torch") == ["tensor", "embed", "score", "classify", "upscale"]


@pytest.mark.parametrize(
    ("task", "engine", "message"),
    [
        ("embed", "genai", "engine: genai needs task: generate"),
        ("generate", "python", "engine: python needs task: tensor"),
        ("generate", "onnx", "task: generate needs engine: genai"),
    ],
)
def test_engine_that_cannot_run_the_task_is_rejected(task: str, engine: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSettings.model_validate({"task": task, "engine": engine})


def test_generating_model_has_one_instance() -> None:
    settings = ModelSettings.model_validate({"task": "generate", "engine": "genai", "generate": {"max_running": 7}})
    assert settings.instance_count("cuda") == 1
    assert settings.for_block().batching.max_rows == 7
    with pytest.raises(
        ValueError, match=r"needs instances\.count: 1 \(one instance runs generate\.max_running requests at once"
    ):
        ModelSettings.model_validate({"task": "generate", "engine": "genai", "instances": {"count": 2}})


def test_upscale_with_denoise_has_two_networks() -> None:
    settings = ModelSettings.model_validate({"task": "upscale", "upscale": {"denoise": "denoise.onnx"}})
    assert describe_task("upscale").networks(settings) == (
        Network("model.onnx", ImageWork(2, 8)),
        Network("denoise.onnx", ImageWork(1, 8, is_for_colors=True), "upscale.denoise"),
    )
    assert describe_task("upscale").row_size(settings) == RowSize(side=256)


def test_classify_needs_a_tokenizer_for_texts_only() -> None:
    texts = ModelSettings.model_validate({"task": "classify", "classify": {"input": "text"}})
    assert describe_task("classify").files(texts) == TaskFiles("tokenizer.json", "labels.txt")
    assert describe_task("classify").files(ModelSettings(task="classify")) == TaskFiles(labels="labels.txt")


def test_task_of_no_package_has_defaults_until_it_is_loaded() -> None:
    assert describe_task("missing").takes_texts(ModelSettings(), None) is False
    with pytest.raises(ConfigError, match="no installed package provides it"):
        load_description("missing")


def test_overlap_of_half_a_tile_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"less than half of upscale\.tile") as caught:
        ModelSettings.model_validate({"upscale": {"tile": 32, "overlap": 16}})
    assert isinstance(caught.value.errors()[0]["ctx"]["error"], ConflictingValues)  # type: ignore[attr-defined]
