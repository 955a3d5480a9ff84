"""Contexts: servers that a user saved by name, in the user's configuration folder."""

from pathlib import Path

from pydantic import BaseModel, ValidationError

from penstock.core.config import find_user_config_folder
from penstock.core.error_text import describe_first_problem
from penstock.core.errors import ConfigError, InvalidRequest
from penstock.terminal.command_files import write_bytes

FILE = "contexts.json"


class Context(BaseModel):
    """The address of a server, and the API key and authority with which commands call it."""

    server: str
    key_file: Path | None = None
    ca: Path | None = None


class Contexts(BaseModel):
    """All saved contexts; `current` is the name of the context that commands use, or empty."""

    current: str = ""
    contexts: dict[str, Context] = {}

    def find(self, name: str) -> Context:
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none is saved"
            raise InvalidRequest(f"there is no context '{name}': choose one of these: {known}")
        return self.contexts[name]

    def save(self) -> None:
        write_bytes(_contexts_file(), self.model_dump_json(indent=2, exclude_none=True).encode() + b"\n")


def read_contexts() -> Contexts:
    try:
        return Contexts.model_validate_json(_contexts_file().read_bytes())
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise ConfigError(f"{_contexts_file()}: the saved contexts cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problem = describe_first_problem(error)
        raise ConfigError(
            f"{_contexts_file()} is not a valid contexts file ({problem}): correct or remove it"
        ) from error


def _contexts_file() -> Path:
    return find_user_config_folder() / FILE
