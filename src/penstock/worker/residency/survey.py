"""Reads a block's model folder before the block is loaded, to estimate its memory and describe it to gateways."""

from pathlib import Path
from typing import NamedTuple

from penstock.core.blocks import BlockDescription
from penstock.models.folder import model_files, read_version, size_bytes
from penstock.models.model_yaml import ModelSettings
from penstock.telemetry.gpus import Gpus
from penstock.worker.residency.residency_actions import BlockAssignment, LoadEstimate

CONTEXT_BYTES = 512 * 1024 * 1024  # approximate GPU memory of CUDA and its libraries


class SurveyResult(NamedTuple):
    estimate: LoadEstimate
    description: BlockDescription  # used until the block is loaded


def survey(block: BlockAssignment, folder: Path, gpus: Gpus) -> SurveyResult:
    """Read the model's settings and file sizes; raise ConfigError if the settings are invalid."""
    model = read_version(folder, block.version)
    estimate = estimate_load(model.settings, size_bytes(model_files(model, block.version)), gpus)
    return SurveyResult(estimate, describe_from_settings(block, model.settings))


def estimate_load(settings: ModelSettings, files_bytes: int, gpus: Gpus) -> LoadEstimate:
    """Estimate the memory that loading the model takes.

    On a GPU, this is the size in the settings, or else the size of the model's files plus that of CUDA's libraries.
    """
    sessions, residence = settings.sessions, settings.residence
    keep_s = sessions.idle_s if sessions.is_stateful else 0.0
    gpu = gpus.find(settings.instances.device)
    if gpu is None:
        return LoadEstimate(residence, keep_s, files_bytes)
    device_bytes = residence.device_memory_bytes or files_bytes + CONTEXT_BYTES
    return LoadEstimate(residence, keep_s, files_bytes, gpu.device, device_bytes, gpu.memory_bytes)


def describe_from_settings(block: BlockAssignment, settings: ModelSettings) -> BlockDescription:
    """Return a block's description from its model.yaml, without the fields that are known only after loading."""
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
