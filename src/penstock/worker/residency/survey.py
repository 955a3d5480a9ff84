"""Estimates and describes a block from its model's folder, before the block is loaded."""

from pathlib import Path
from typing import NamedTuple

from penstock.core.blocks import BlockDescription
from penstock.models.folder import model_files, read_version, size_bytes
from penstock.models.model_yaml import ModelSettings
from penstock.telemetry.gpus import Gpus
from penstock.worker.residency.residency_actions import BlockAssignment, LoadEstimate

CONTEXT_BYTES = 512 * 1024 * 1024  # approximate GPU memory of CUDA and its libraries


class Surveyed(NamedTuple):
    outlook: LoadEstimate
    description: BlockDescription  # used until the block is loaded


def survey(block: BlockAssignment, folder: Path, gpus: Gpus) -> Surveyed:
    """Read the model's files; raise ConfigError if they are invalid."""
    model = read_version(folder, block.version)
    outlook = estimate_load(model.settings, size_bytes(model_files(model, block.version)), gpus)
    return Surveyed(outlook, describe_from_settings(block, model.settings))


def estimate_load(settings: ModelSettings, files_bytes: int, gpus: Gpus) -> LoadEstimate:
    """Estimate a load. On a GPU, use the configured size, or else the size of the model's files and of CUDA."""
    sessions, residence = settings.sessions, settings.residence
    keep_s = sessions.idle_s if sessions.is_stateful else 0.0
    gpu = gpus.find(settings.instances.device)
    if gpu is None:
        return LoadEstimate(residence, keep_s, files_bytes)
    device_bytes = residence.device_memory_bytes or files_bytes + CONTEXT_BYTES
    return LoadEstimate(residence, keep_s, files_bytes, gpu.device, device_bytes, gpu.memory_bytes)


def describe_from_settings(block: BlockAssignment, settings: ModelSettings) -> BlockDescription:
    """Return a block's description from its model.yaml; the engine adds the other fields when the block is loaded."""
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
