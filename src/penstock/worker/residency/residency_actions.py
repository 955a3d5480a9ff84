"""The input data of `residency.py`'s decisions, and the actions that it returns."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.core.settings import Residence


class LoadReason(StrEnum):
    """Why a block is loaded."""

    START = "start"  # the block was deployed and is not lazy
    RELOAD = "reload"  # a newer revision replaces the one that serves
    DEMAND = "demand"  # a job waits for the block


@dataclass(frozen=True, slots=True)
class BlockAssignment:
    block_id: str
    model: str
    version: str
    folder: str
    revision: int
    replaces: tuple[str, ...] = field(
        default=(), compare=False
    )  # blocks that serve until every worker has loaded this block
    is_new: bool = field(default=False, compare=False)  # loaded even if it is lazy, to make sure that it can be loaded


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """An estimate, made before the load, of the memory that a block needs, and the GPU that it needs."""

    residence: Residence
    keep_s: float = (
        0.0  # time after its last use in which it may not be evicted, because it holds the state of sessions
    )
    files_bytes: int = 0
    device: str = ""  # the GPU whose memory the block needs, or an empty text
    device_bytes: int = 0  # as configured, or estimated from the size of its files
    device_total_bytes: int = 0


class DeviceRoom(NamedTuple):
    """A GPU's free memory, as measured at one moment."""

    free_bytes: int  # without the memory that loading workers have claimed
    claimed_bytes: int = 0  # by loading workers, which may already use a part of it


@dataclass(frozen=True, slots=True)
class SurveyBlocks:
    """An action: read the model folders of these blocks, and report a LoadEstimate for each."""

    blocks: tuple[BlockAssignment, ...]


@dataclass(frozen=True, slots=True)
class LoadBlock:
    block: BlockAssignment
    reason: LoadReason
    device: str = ""
    device_bytes: int = 0  # to claim on the device


@dataclass(frozen=True, slots=True)
class MakeBlockDormant:
    """An action: accept jobs of a block that is not loaded, and keep them until it is loaded."""

    block_id: str


@dataclass(frozen=True, slots=True)
class UnloadBlock:
    block_id: str
    event: str  # unloaded, idle, evicted


@dataclass(frozen=True, slots=True)
class ForgetBlock:
    """An action: return the jobs of a block that is no longer assigned to this worker."""

    block_id: str


@dataclass(frozen=True, slots=True)
class FailBlock:
    """An action: fail the jobs that wait for a block. An older revision in memory continues to serve."""

    block: BlockAssignment
    reason: str
    is_device_full: bool = False


Action = SurveyBlocks | LoadBlock | MakeBlockDormant | UnloadBlock | ForgetBlock | FailBlock
