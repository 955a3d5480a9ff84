"""Reads the JSON files in a model folder that was saved by transformers or sentence-transformers."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.core.error_text import explain_cause
from penstock.core.errors import ConfigError

CLASSIFIER = "ForSequenceClassification"
MODULES = "modules.json"
TOKENIZER = "tokenizer.json"
MAX_LENGTH = 512  # tokens of a text, if no file sets a limit
UNNAMED_LABELS = 2  # number of labels of a model whose config.json names none


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    config: Mapping[str, Any]
    architectures: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Read config.json; raise ConfigError if it is missing or invalid."""
        path = folder / "config.json"
        config = read_json(path)
        if not isinstance(config, dict):
            raise file_error(path, "must be an object")
        names = config.get("architectures") or []
        if not isinstance(names, list):
            raise file_error(path, f"architectures must be a list, got {names!r}")
        return cls(folder, config, tuple(map(str, names)))

    @property
    def is_classifier(self) -> bool:
        """True if the model's output is one number per label, and not an embedding."""
        return any(name.endswith(CLASSIFIER) for name in self.architectures)

    def find_tokenizer(self) -> Path:
        file = self.folder / TOKENIZER
        if not file.is_file():
            raise file_error(
                file,
                "no such file; if transformers can read the folder, it can write this file: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )
        return file

    def labels(self) -> list[str]:
        path, given = self.folder / "config.json", self.config.get("id2label")
        if given is None:
            return [f"LABEL_{index}" for index in range(UNNAMED_LABELS)]
        try:
            named = {int(key): " ".join(str(label).split()) for key, label in given.items()}
            labels = [named[index] for index in range(len(named))]
        except (AttributeError, ValueError, KeyError) as error:
            raise file_error(path, "id2label must map the numbers from 0 to labels without a gap") from error
        if not labels or "" in labels:
            raise file_error(path, "id2label has an empty label")
        return labels

    def max_length(self) -> int:
        """Return how many tokens a text may have: the tokenizer's limit, or the network's if that is lower."""
        lengths = [
            self._read_length("sentence_bert_config.json", "max_seq_length"),
            self._read_length("tokenizer_config.json", "model_max_length"),
        ]
        positions = self.config.get("max_position_embeddings")
        if isinstance(positions, int) and "roberta" in str(self.config.get("model_type")):
            positions -= 2  # RoBERTa's positions start after the padding's
        wanted = next((length for length in lengths if length), MAX_LENGTH)
        return min(wanted, positions) if isinstance(positions, int) and positions > 0 else wanted

    def _read_length(self, file: str, key: str) -> int:
        """Return the value of `key` in the file, or 0 if the value is missing or means "no limit"."""
        path = self.folder / file
        found = read_json(path) if path.is_file() else {}
        value = found.get(key) if isinstance(found, dict) else None
        return value if isinstance(value, int) and 0 < value <= 65_536 else 0


def require_file(path: Path) -> Path:
    if not path.is_file():
        raise file_error(path, "no such file")
    return path


def read_json(path: Path) -> Any:
    try:
        return json.loads(require_file(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise file_error(path, f"is not valid JSON: {explain_cause(error)}") from error


def file_error(path: Path, message: str) -> ConfigError:
    return ConfigError(f"{path}: {message}", file=str(path))


@contextmanager
def create_version_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary path for a new model version's folder; afterwards, move the folder to `target`.

    If the body of the `with` statement raises, nothing is left at `target`.
    """
    if target.exists():
        raise ConfigError(f"{target}: already exists; remove it, or import under another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
        try:
            yield Path(folder) / target.name
        except shutil.Error as error:
            raise ConfigError(f"{target}: cannot be written: {error}") from error
        (Path(folder) / target.name).replace(target)
