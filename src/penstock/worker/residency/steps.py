"""What residency is told of blocks, and the steps that it decides on."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.core.settings import Residence


class Why(StrEnum):
    """Why a block is loaded."""

    START = "start"  # it was deployed, and is eager
    RELOAD = "reload"  # a newer revision, while the older serves on
    DEMAND = "demand"  # somebody waits for it


@dataclass(frozen=True, slots=True)
class Assigned:
    block_id: str
    model: str
    version: str
    folder: str
    revision: int
    replaces: tuple[str, ...] = field(default=(), compare=False)  # blocks that serve until every worker has this one
    is_new: bool = field(default=False, compare=False)  # it must be known to load, even where it is lazy


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a model's folder tells before it is loaded."""

    residence: Residence
    keep_s: float = 0.0  # after its last use nobody may evict it: sessions have their state in it
    files_bytes: int = 0
    device: str = ""  # the GPU whose memory it takes; empty: none that is counted
    device_bytes: int = 0  # of it: as its settings say, or by its files
    device_total_bytes: int = 0


class DeviceRoom(NamedTuple):
    """On a GPU at one moment."""

    free_bytes: int  # less what others are about to take
    claimed_bytes: int = 0  # by those that load there: how much of it they have already, nobody can tell


@dataclass(frozen=True, slots=True)
class SurveyBlocks:
    """Look at these models' folders, and tell what they say."""

    blocks: tuple[Assigned, ...]


@dataclass(frozen=True, slots=True)
class LoadBlock:
    block: Assigned
    why: Why
    device: str = ""
    device_bytes: int = 0  # to be claimed there


@dataclass(frozen=True, slots=True)
class RestBlock:
    """Take the block's jobs and keep them until it is loaded."""

    block_id: str


@dataclass(frozen=True, slots=True)
class UnloadBlock:
    block_id: str
    event: str  # unloaded, idle, evicted


@dataclass(frozen=True, slots=True)
class ForgetBlock:
    """Nobody wants the block any more: what waits for it goes back."""

    block_id: str


@dataclass(frozen=True, slots=True)
class FailBlock:
    """The block could not be loaded: what waits for it fails; an older revision in memory serves on."""

    block: Assigned
    reason: str
    is_device_full: bool = False


Action = SurveyBlocks | LoadBlock | RestBlock | UnloadBlock | ForgetBlock | FailBlock
