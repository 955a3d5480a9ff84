"""What a model's folder tells of a block before it is loaded."""

from pathlib import Path
from typing import NamedTuple

from penstock.core.blocks import BlockDescription
from penstock.models.folder import model_files, read_version, size_bytes
from penstock.models.settings import ModelSettings
from penstock.telemetry.devices import Gpus
from penstock.worker.residency.steps import Assigned, Outlook

CONTEXT_BYTES = 512 * 1024 * 1024  # of CUDA and its libraries, about


class Surveyed(NamedTuple):
    outlook: Outlook
    description: BlockDescription  # until it is loaded


def survey(block: Assigned, folder: Path, gpus: Gpus) -> Surveyed:
    """Reads files; raises what is wrong with them."""
    model = read_version(folder, block.version)
    outlook = outlook_of(model.settings, size_bytes(model_files(model, block.version)), gpus)
    return Surveyed(outlook, undescribed(block, model.settings))


def outlook_of(settings: ModelSettings, files_bytes: int, gpus: Gpus) -> Outlook:
    """On a GPU: what it says itself that it takes, or its weights and what CUDA takes in each process."""
    sessions, residence = settings.sessions, settings.residence
    keep_s = sessions.idle_s if sessions.is_stateful else 0.0
    gpu = gpus.find(settings.instances.device)
    if gpu is None:
        return Outlook(residence, keep_s, files_bytes)
    device_bytes = residence.device_memory_bytes or files_bytes + CONTEXT_BYTES
    return Outlook(residence, keep_s, files_bytes, gpu.device, device_bytes, gpu.memory_bytes)


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
