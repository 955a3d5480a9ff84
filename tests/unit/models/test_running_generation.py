"""A model that generates text, run without a worker."""

from pathlib import Path

import pytest

from penstock.core.config import Limits
from penstock.core.errors import EngineFailed, InvalidRequest
from penstock.core.generation import Generation, Progress
from penstock.core.settings import Timeouts
from penstock.models.building import TaskSpec, build_task
from penstock.models.loading import LoadedModel
from penstock.models.running import first_answers
from tests.generating_bed import CHAT, Scripted, found, generate_settings, grown, request_of


class Parrot(Scripted):
    """An engine that repeats its prompt once."""

    def add(self, number: int, generation: Generation) -> None:
        if generation.prompt.text == "silence":
            return
        if generation.prompt.text == "nonsense":
            self.step(Progress(number, failure=InvalidRequest("it makes no sense"), is_over=True))
            return
        self.step(grown(number, generation.prompt.text, first=1))
        self.step(grown(number, "!", "stop", is_over=True))


@pytest.fixture
def model() -> LoadedModel:
    spec = TaskSpec(Path("nowhere"), generate_settings(timeouts=Timeouts(request_s=0.05)), CHAT, Limits())
    return LoadedModel(spec, build_task(spec), Parrot())


def test_generator_returns_its_whole_answer(model: LoadedModel) -> None:
    (answer,) = first_answers(model, request_of(["a", "b"]), 3)
    assert found(answer)["text_output"] == ["a!", "b!"]


def test_rejection_and_timeout_of_a_generator_are_errors(model: LoadedModel) -> None:
    with pytest.raises(InvalidRequest, match="no sense"):
        first_answers(model, request_of("nonsense"), 3)
    with pytest.raises(EngineFailed, match="did not generate a token"):
        first_answers(model, request_of("silence"), 3)
