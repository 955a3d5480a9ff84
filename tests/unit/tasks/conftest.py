"""The sentence encoder that the tests of tasks share."""

from pathlib import Path

import pytest

from penstock.engines.onnx.bert_file import convert, find_minilm_weights


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    convert(find_minilm_weights(), folder)
    return folder
