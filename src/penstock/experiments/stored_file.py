"""Typed JSON files with the results of a run: unknown keys are errors, and writing is atomic."""

import os
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class StoredModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StoredFile(StoredModel):
    file_name: ClassVar[str]

    def save(self, folder: Path) -> Path:
        """Write the file atomically, so that an interruption leaves the previous file."""
        file = folder / self.file_name
        partial = folder / f".{self.file_name}.{os.getpid()}.partial"
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
        return file
