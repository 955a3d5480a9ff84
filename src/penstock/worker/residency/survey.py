"""What a model's folder tells of a block before it is loaded."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from penstock.core.blocks import BlockDescription
from penstock.core.errors import message_of
from penstock.models.folder import model_files, read_version, size_bytes
from penstock.models.settings import ModelSettings
from penstock.worker.residency.steps import Assigned, Outlook


class Surveyed(NamedTuple):
    outlook: Outlook
    description: BlockDescription  # until it is loaded


def survey(blocks: Iterable[Assigned]) -> list[tuple[Assigned, Surveyed | str]]:
    """Reads files; where a folder cannot be read, the text says why."""
    found: list[tuple[Assigned, Surveyed | str]] = []
    for block in blocks:
        try:
            model = read_version(Path(block.folder), block.version)
            outlook = outlook_of(model.settings, size_bytes(model_files(model, block.version)))
            found.append((block, Surveyed(outlook, undescribed(block, model.settings))))
        except Exception as error:  # noqa: BLE001 - it is reported, whatever is wrong with the folder
            found.append((block, message_of(error)))
    return found


def outlook_of(settings: ModelSettings, files_bytes: int) -> Outlook:
    residence, sessions = settings.residence, settings.sessions
    return Outlook(
        is_lazy=residence.load == "lazy",
        idle_unload_s=residence.idle_unload_s,
        max_waiting_s=residence.max_waiting_s,
        keep_s=sessions.idle_s if sessions.is_stateful else 0.0,
        files_bytes=files_bytes,
    )


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
        instances=settings.instance_count(),
        settings=settings.for_block(),
        device=settings.instances.device,
        is_described=False,
    )
