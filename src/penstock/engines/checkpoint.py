"""A model's folder as transformers or sentence-transformers save it: what its JSON files say."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.core.errors import ConfigError

CLASSIFIER = "ForSequenceClassification"
MODULES = "modules.json"
TOKENIZER = "tokenizer.json"
MAX_LENGTH = 512  # where nothing says how long a text may be
UNNAMED_LABELS = 2  # config.json says nothing where there are so many


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    config: Mapping[str, Any]
    architectures: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Raises ConfigError with the file that is missing or wrong."""
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
        """Whether it gives one number for each label, not a vector."""
        return any(name.endswith(CLASSIFIER) for name in self.architectures)

    def find_tokenizer(self) -> Path:
        file = self.folder / TOKENIZER
        if not file.is_file():
            raise file_error(
                file,
                "no such file; where transformers can read the folder, it writes one: "
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
            raise file_error(path, "id2label must name the labels by numbers from 0 on") from error
        if not labels or "" in labels:
            raise file_error(path, "id2label has an empty label")
        return labels

    def max_length(self) -> int:
        """The longest text in tokens: what its authors say, and no more than it has positions."""
        said = [
            self._setting("sentence_bert_config.json", "max_seq_length"),
            self._setting("tokenizer_config.json", "model_max_length"),
        ]
        positions = self.config.get("max_position_embeddings")
        if isinstance(positions, int) and "roberta" in str(self.config.get("model_type")):
            positions -= 2  # it counts from behind the padding's
        wanted = next((length for length in said if length), MAX_LENGTH)
        return min(wanted, positions) if isinstance(positions, int) and positions > 0 else wanted

    def _setting(self, file: str, key: str) -> int:
        """0 where it is not set, or to the huge number that stands for no limit."""
        path = self.folder / file
        found = read_json(path) if path.is_file() else {}
        value = found.get(key) if isinstance(found, dict) else None
        return value if isinstance(value, int) and 0 < value <= 65_536 else 0


def require(path: Path) -> Path:
    if not path.is_file():
        raise file_error(path, "no such file")
    return path


def read_json(path: Path) -> Any:
    try:
        return json.loads(require(path).read_bytes())
    except (OSError, ValueError) as error:
        raise file_error(path, f"is not valid JSON: {error}") from error


def file_error(path: Path, message: str) -> ConfigError:
    return ConfigError(f"{path}: {message}", file=str(path))


@contextmanager
def making_version(target: Path) -> Iterator[Path]:
    """A path to make a folder at, which is then the version's, as a whole or not at all."""
    if target.exists():
        raise ConfigError(f"{target}: is there already; remove it, or import under another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
        try:
            yield Path(folder) / target.name
        except shutil.Error as error:
            raise ConfigError(f"{target}: cannot be written: {error}") from error
        (Path(folder) / target.name).replace(target)
