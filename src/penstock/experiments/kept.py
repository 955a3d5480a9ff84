"""What a run leaves as a JSON file: typed, with no unknown keys, and written whole or not at all."""

import os
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Kept(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KeptFile(Kept):
    file_name: ClassVar[str]

    def save(self, folder: Path) -> Path:
        """An interruption leaves the file as it was."""
        file = folder / self.file_name
        partial = folder / f".{self.file_name}.{os.getpid()}.partial"
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
        return file
