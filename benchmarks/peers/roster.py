"""The participants: adapters that can be imported, and the reasons why others cannot."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import venvs
from benchmarks.peers.failures import InstallFailed
from benchmarks.peers.peer import NOOP, SRCNN, Peer, Setting
from benchmarks.peers.plan import CEILING, OFFERED, PENSTOCK, Contender, Group, choose_kind, find_same_group
from benchmarks.peers.search import Choice

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Entrant:
    """A server by name; if it has no peer, `reason` says why."""

    name: str
    peer: Peer | None = None
    python: Path | None = None
    reason: str = ""

    @property
    def title(self) -> str:
        return self.peer.title if self.peer else self.name


def load_entrant(name: str) -> Entrant:
    try:
        peer: Peer = importlib.import_module(f"benchmarks.peers.{name}.adapter").PEER
    except Exception as error:  # noqa: BLE001 — whatever is wrong with one adapter, the others are measured
        return Entrant(name, reason=f"no adapter: {type(error).__name__}: {error}")
    try:
        return Entrant(name, peer, venvs.ensure_venv(HERE / name, HERE / ".venvs"))
    except InstallFailed as error:
        return Entrant(name, peer, reason=str(error))


def contenders(group: Group, entrants: Sequence[Entrant], choice: Choice) -> list[Contender]:
    """Return the contenders with the settings that the search chose; a peer in the group "best" may have two."""
    found = [Contender(CEILING, "in process (ceiling)")] if group.has_ceiling else []
    for entrant in entrants:
        found += _make_contender(entrant, group, choice)
    return found


def candidates(group: Group, entrant: Entrant) -> list[Contender]:
    """Return every setting for the search, over the first protocol of its server."""
    if entrant.peer is None or entrant.reason:
        return [Contender(entrant.name, entrant.title, failure=entrant.reason)]
    settings = entrant.peer.settings(group.workload, group.comparison)
    if not settings:
        return [Contender(entrant.name, entrant.title, refusal=entrant.peer.refusal(group.workload, group.comparison))]
    protocols = tuple(entrant.peer.protocols(group.workload)[:1])
    return [
        Contender(entrant.name, entrant.title, protocols, setting, choose_kind(entrant.name, group.comparison, setting))
        for setting in settings
    ]


def _make_contender(entrant: Entrant, group: Group, choice: Choice) -> list[Contender]:
    found = candidates(group, entrant)
    if entrant.peer is None or found[0].setting is None:
        return found
    by_kind: dict[str, list[Setting]] = {}
    for contender in found:
        assert contender.setting is not None
        by_kind.setdefault(contender.kind, []).append(contender.setting)
    same = find_same_group(group)
    # The settings for the same file are the peer's own way, too. A photograph takes so long that these are not
    # measured once more: the group of the same file shows them.
    if "" not in by_kind and group.workload != SRCNN:
        by_kind.setdefault(OFFERED, []).extend(entrant.peer.settings(same.workload, same.comparison))
    # Penstock uses all of its protocols; a peer only its fastest, unless the group compares protocols.
    is_every = (entrant.name == PENSTOCK and not group.open_levels) or group.workload == NOOP
    protocols = tuple(entrant.peer.protocols(group.workload)) if is_every else found[0].protocols
    return [
        Contender(
            entrant.name,
            entrant.title,
            protocols,
            choice.winner([group.name, same.name], entrant.name, settings),
            kind,
        )
        for kind, settings in by_kind.items()
        if settings
    ]
