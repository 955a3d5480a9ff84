"""Files that only their owner can read."""

import os
from pathlib import Path


def replace_private(file: Path, data: bytes) -> None:
    """Replace a private file atomically, so that a reader never sees a part of the new content."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.new")
    draft.unlink(missing_ok=True)
    opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "wb") as writing:
        writing.write(data)
    draft.replace(file)
