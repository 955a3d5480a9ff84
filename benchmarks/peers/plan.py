"""The plan of a run: groups of loads, rounds, and the contenders' turns in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.peers.peer import BEST, MINILM, NOOP, SAME, SRCNN, Setting
from benchmarks.peers.results import Record, WindowRow

PENSTOCK, CEILING = "penstock", "ceiling"
PEERS = ("triton", "kserve", "mlserver", "ray_serve", "bentoml", "litserve", "torchserve", "infinity")
SERVERS = (PENSTOCK, *PEERS)
CONCURRENCIES = (1, 8, 32, 64)
MIXED, QUERIES, PHOTOS, TENSOR = "mixed", "queries", "photos", "tensor"
# Of a peer's settings for BEST: those that its documentation offers, and those whose handler calls OpenVINO by hand.
OFFERED, BY_HAND = "offered", "by hand"
START_S, GENERATOR_S, CEILING_S = 12.0, 2.0, 20.0  # approximate times, to estimate the remaining time


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """The load of one window: a number of callers or, if `share` is set, requests at a share of the peak rate."""

    load: str
    concurrency: int
    seconds: float
    warm_up_s: float
    share: float = 0.0  # of the requests a second that the best peer's callers get through
    rate: float = 0.0  # requests a second; known when that is

    @property
    def name(self) -> str:
        return f"{self.load} at {self.share:.0%}" if self.share else self.load

    def scaled(self, factor: float) -> "LoadLevel":
        return replace(self, seconds=self.seconds * factor, warm_up_s=self.warm_up_s * factor)


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    title: str
    workload: str
    comparison: str
    levels: tuple[LoadLevel, ...]
    rounds: int
    has_ceiling: bool = False

    @property
    def open_levels(self) -> tuple[LoadLevel, ...]:
        return tuple(level for level in self.levels if level.share)

    def at_peak(self) -> "Group":
        """Return the group without open loops, which is measured before the peak rate is known."""
        return replace(self, levels=tuple(level for level in self.levels if not level.share))

    def at_rates(self, peak: float) -> "Group":
        return replace(self, levels=tuple(replace(level, rate=level.share * peak) for level in self.open_levels))


@dataclass(frozen=True, slots=True)
class Contender:
    """A server in a group of loads. Without a setting, it cannot serve the workload and is not started."""

    server: str
    title: str
    protocols: tuple[str, ...] = ()
    setting: Setting | None = None
    kind: str = ""  # OFFERED, BY_HAND, or empty where the two are not told apart
    refusal: str = ""  # why the server cannot serve the workload
    failure: str = ""  # why the server could not be installed

    @property
    def setting_name(self) -> str:
        return self.setting.name if self.setting else ""


@dataclass(frozen=True, slots=True)
class PeerTurn:
    group: Group
    number: int  # number of the round
    contender: Contender

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the key of a contender within a group."""
        return self.group.name, self.contender.server, self.contender.kind, self.contender.setting_name

    def record(self, rows: Sequence[WindowRow], failure: str = "") -> Record:
        group, server, kind, setting = self.key
        title, refusal = self.contender.title, self.contender.refusal
        return Record(group, self.number, server, kind, title, setting, list(rows), failure, refusal)

    @property
    def planned_s(self) -> float:
        if self.contender.server == CEILING:
            return CEILING_S
        windows = sum(level.seconds + level.warm_up_s + GENERATOR_S for level in self.group.levels)
        return START_S + len(self.contender.protocols) * windows if self.contender.setting else 0.0


_TEXT = (*(LoadLevel(MIXED, count, 4.0, 1.5) for count in CONCURRENCIES), LoadLevel(QUERIES, 64, 4.0, 1.5))
# A warm-up holds the first answers of all callers, or latencies would still be growing in the window.
_PHOTO = (
    LoadLevel(PHOTOS, 1, 4.0, 1.0),
    LoadLevel(PHOTOS, 8, 5.0, 2.0),
    LoadLevel(PHOTOS, 32, 6.0, 6.0),
    LoadLevel(PHOTOS, 64, 8.0, 10.0),
)
_TENSOR = tuple(LoadLevel(TENSOR, count, 2.5, 1.0) for count in CONCURRENCIES)
SHARES = (0.5, 0.7, 0.9)
OPEN_PEERS = 2  # the peers with the highest peaks
_OPEN = (LoadLevel(MIXED, 32, 6.0, 2.0), *(LoadLevel(MIXED, 64, 12.0, 3.0, share) for share in SHARES))
GROUPS = (
    Group("minilm", "Text, the same ONNX file on ONNX Runtime FP32", MINILM, SAME, _TEXT, 2, has_ceiling=True),
    Group("minilm-best", "Text, each server's best within cosine 0.9999", MINILM, BEST, _TEXT, 1, has_ceiling=True),
    Group("srcnn", "Photographs, the same ONNX file on ONNX Runtime FP32", SRCNN, SAME, _PHOTO, 1),
    Group("srcnn-best", "Photographs, each server's best within 6/255", SRCNN, BEST, _PHOTO, 1),
    Group("open", "Text at rates that nobody's answers slow down, FP32 as above", MINILM, SAME, _OPEN, 5),
    Group("noop", "No-op: a tensor of 256 floats, there and back", NOOP, SAME, _TENSOR, 2),
)
# The search measures one window of each candidate.
SEARCH_CONCURRENCY = {MINILM: 32, SRCNN: 8, NOOP: 32}
BEST_WARM_UP = 3.0  # times


def make_search_group(group: Group) -> Group:
    level = next(level for level in group.levels if level.concurrency == SEARCH_CONCURRENCY[group.workload])
    if group.comparison == BEST:
        # OpenVINO prepares each shape that it has not seen; in the whole run the windows before this one do that.
        level = replace(level, warm_up_s=level.warm_up_s * BEST_WARM_UP)
    return replace(group, levels=(level,), rounds=1, has_ceiling=False)


def find_same_group(group: Group) -> Group:
    """Return the group that measures this workload with the same file on every server."""
    return next(other for other in GROUPS if (other.workload, other.comparison) == (group.workload, SAME))


def choose_kind(server: str, comparison: str, setting: Setting) -> str:
    if server == PENSTOCK or comparison == SAME:
        return ""
    return BY_HAND if setting.values.get("engine") == "openvino" else OFFERED


def plan_turns(groups: Sequence[Group], contenders: Mapping[str, Sequence[Contender]]) -> list[PeerTurn]:
    """Return the turns by group; every other round runs backwards, so that no contender always follows the same one."""
    found = []
    for group in groups:
        if group.open_levels:
            found += [PeerTurn(group.at_peak(), 0, contender) for contender in contenders[group.name]]
        else:
            found += _rounds(group, range(group.rounds), contenders[group.name])
    return found


def plan_open_turns(groups: Sequence[Group], peaks: Sequence[PeerTurn], records: Sequence[Record]) -> list[PeerTurn]:
    """Return turns for Penstock and the peers with the highest peaks, at shares of the highest peak."""
    found: list[PeerTurn] = []
    for group in groups:
        own = [turn for turn in peaks if turn.group.name == group.name and group.open_levels]
        peak_of = {record.key: record.rows[0].rps for record in records if record.number == 0 and record.rows}
        able = sorted((turn for turn in own if turn.key in peak_of), key=lambda turn: -peak_of[turn.key])
        peers = [turn for turn in able if turn.contender.server != PENSTOCK][:OPEN_PEERS]
        ours = [turn for turn in able if turn.contender.server == PENSTOCK]
        if peers and ours:
            rated = group.at_rates(peak_of[peers[0].key])
            found += _rounds(rated, range(1, group.rounds + 1), [turn.contender for turn in (*ours, *peers)])
    return found


def _rounds(group: Group, numbers: range, contenders: Sequence[Contender]) -> list[PeerTurn]:
    found = []
    for number in numbers:
        order = contenders if number % 2 == 0 else list(reversed(contenders))
        found += [PeerTurn(group, number, contender) for contender in order]
    return found


def is_done(turn: PeerTurn, records: Sequence[Record]) -> bool:
    """Return whether the turn needs no measurement: it was measured, or its contender fails in this group."""
    own = [record for record in records if record.key == turn.key]
    if any(record.number == turn.number for record in own):
        return True
    return bool(own) and all(record.failure or record.refusal for record in own)


def keep(records: Sequence[Record], planned: Sequence[PeerTurn]) -> list[Record]:
    """Return the records that a resumed run keeps: those with the same settings and without failures."""
    touched = {(turn.group.name, turn.contender.server) for turn in planned}
    return [
        record
        for record in records
        if (record.group, record.server) not in touched
        or (not record.failure and any(record.key == turn.key for turn in planned))
    ]
