"""What a model's folder tells of a block before it is loaded."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.blocks import BlockDescription
from penstock.core.errors import ConfigError, PenstockError
from penstock.models.folder import ModelFolder, read_model_folder
from penstock.models.settings import ModelSettings
from penstock.worker.residency.steps import Assigned, Outlook

INSTANCES_ON_A_GPU = 4  # one computes while the others' batches are joined, copied and launched


@dataclass(frozen=True, slots=True)
class Surveyed:
    settings: ModelSettings
    files_bytes: int

    def outlook(self) -> Outlook:
        residence, sessions = self.settings.residence, self.settings.sessions
        return Outlook(
            is_lazy=residence.load == "lazy",
            idle_unload_s=residence.idle_unload_s,
            max_waiting_s=residence.max_waiting_s,
            keep_s=sessions.idle_s if sessions.is_stateful else 0.0,
            files_bytes=self.files_bytes,
        )


def survey(blocks: Iterable[Assigned]) -> list[tuple[Assigned, Surveyed | str]]:
    """Reads files; where a folder cannot be read, the text says why."""
    found: list[tuple[Assigned, Surveyed | str]] = []
    for block in blocks:
        try:
            model = read_version(Path(block.folder), block.version)
            found.append((block, Surveyed(model.settings, size_bytes(model_files(model, block.version)))))
        except Exception as error:  # noqa: BLE001 - it is reported, whatever is wrong with the folder
            found.append((block, reason(error)))
    return found


def undescribed(block: Assigned, settings: ModelSettings) -> BlockDescription:
    """Of a block that was never loaded: what its model.yaml says."""
    return BlockDescription(
        block_id=block.block_id,
        model=block.model,
        version=block.version,
        platform="",
        precision=settings.precision,
        inputs=(),
        outputs=(),
        max_batch_size=0,
        instances=instance_count(settings),
        settings=settings.for_block(),
        device=settings.instances.device,
        is_described=False,
    )


def read_version(folder: Path, version: str) -> ModelFolder:
    model = read_model_folder(folder)
    if version not in model.versions:
        raise ConfigError(f"{folder}: version {version} is not there any more")
    return model.of_version(version)


def model_files(model: ModelFolder, version: str) -> list[Path]:
    """Its model.yaml and all that lies in the version's folder: a model may keep its weights in files beside it."""
    found = [model.path / "model.yaml"]
    for folder, folders, names in os.walk(model.path / version):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return found


def size_bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def fingerprint_of(root: Path, files: Sequence[Path]) -> str:
    """The same for the same files, wherever they lie and however old they are."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").digest()
        name = os.fsencode(file.relative_to(root))
        total.update(len(name).to_bytes(4, "big") + name + digest)
    return total.hexdigest()


def instance_count(settings: ModelSettings, device: str = "cpu") -> int:
    """`device` is the one that runs the model: what `auto` became."""
    instances = settings.instances
    if instances.count != "auto":
        return instances.count
    if settings.sessions.is_stateful:
        return 1  # the requests of a session must not overtake each other
    if device != "cpu":
        return INSTANCES_ON_A_GPU
    return max(1, len(os.sched_getaffinity(0)) // instances.threads)


def reason(error: Exception) -> str:
    return error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
