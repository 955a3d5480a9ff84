"""`penstock serve`: the folder of the models, and the commands that the server proposes when it is ready."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.app.local_server import ReadyServer
from penstock.cli import main as cli
from penstock.cli.serve_command import list_examples, list_preparations
from penstock.core.blocks import BlockDescription
from penstock.core.config import Config
from penstock.core.errors import InvalidRequest
from penstock.core.settings import BlockSettings
from penstock.core.tensors import TensorSpec


def block(model: str, task: str, *inputs: TensorSpec, **own: Any) -> BlockDescription:
    return BlockDescription(f"blk-{model}", model, "1", "p", "fp32", inputs, (), 8, 1, BlockSettings(task=task), **own)


def ready(*blocks: BlockDescription, asks_for_keys: bool = False) -> ReadyServer:
    return ReadyServer("http://127.0.0.1:8080", "127.0.0.1:50051", asks_for_keys, list(blocks))


def test_the_folder_of_the_models_is_an_argument_or_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs: list[Config] = []
    monkeypatch.setattr("penstock.app.local_server.run_serve", lambda config, *_: configs.append(config))
    for words in (["serve", str(tmp_path)], ["serve", "--models", str(tmp_path)]):
        assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert [config.models for config in configs] == [tmp_path, tmp_path]
    both = CliRunner().invoke(cli.app, ["serve", "a", "--models", "b"])
    assert isinstance(both.exception, InvalidRequest)
    assert "give one of them" in both.exception.message


def test_examples_are_requests_to_models_that_the_server_has() -> None:
    found = list_examples(ready(block("own", "embed"), block("mine", "tensor", TensorSpec("x", "FP32", (-1, 2)))))
    assert [example.split("-i")[0].split(" '")[0].strip() for example in found] == [
        "penstock embed",
        "penstock infer mine",
        "penstock bench own",
    ]
    assert found[0].endswith("--model own")
    assert found[1].endswith("-i 'x=[[0.0, 0.0]]'")


def test_a_model_that_was_never_loaded_has_an_example_only_if_its_inputs_are_known() -> None:
    late, text = (block(name, task, is_described=False) for name, task in (("late", "tensor"), ("text", "generate")))
    found = list_examples(ready(late, text))
    assert found[0].startswith("penstock generate ")
    assert found[1:] == ["penstock status", "penstock top"]


def test_the_shell_is_prepared_for_the_address_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lines = list_preparations(Config(), ready(asks_for_keys=True))
    assert lines[0].startswith("source ")
    assert lines[1] == "export PENSTOCK_SERVER=http://127.0.0.1:8080"
    assert lines[2].startswith("export PENSTOCK_API_KEY=")
