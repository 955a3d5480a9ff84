"""Runs turns: starts, checks, loads and stops one server at a time, so that only this server uses the machine."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from benchmarks.peers.checks import References, check
from benchmarks.peers.failures import LoadFailed, PeerFailed
from benchmarks.peers.items import list_checked_items, list_items
from benchmarks.peers.peer import Assets, Peer
from benchmarks.peers.plan import LoadLevel, PeerTurn
from benchmarks.peers.results import Record, WindowRow
from benchmarks.peers.roster import Entrant
from benchmarks.peers.servers import Server
from penstock.experiments.load.generator import Generator
from penstock.experiments.load.load_process import LoadSpec, Window, write_messages

MIB = 1024 * 1024


@dataclass(slots=True)
class Stage:
    assets: Assets
    references: References
    folder: Path  # for servers' folders and files of requests
    checked: set[tuple[str, str, str, str]] = field(default_factory=set)

    def perform(self, turn: PeerTurn, entrant: Entrant) -> Record:
        """Run a turn and return its record, which contains any failure of the peer."""
        contender = turn.contender
        rows: list[WindowRow] = []
        failure = contender.failure
        if contender.setting is not None:
            try:
                self._measure(turn, entrant, rows)
            except PeerFailed as error:
                failure = str(error)
            except Exception as error:  # noqa: BLE001 — an adapter is foreign code; one that fails must not end the run
                failure = f"{type(error).__name__}: {_explain(error)}"
        return turn.record(rows, failure)

    def _measure(self, turn: PeerTurn, entrant: Entrant, rows: list[WindowRow]) -> None:
        peer, python, setting = entrant.peer, entrant.python, turn.contender.setting
        assert peer is not None
        assert python is not None
        assert setting is not None
        with tempfile.TemporaryDirectory(prefix=f"{entrant.name}-", dir=self.folder) as folder:
            launch = peer.launch(turn.group.workload, setting, self.assets, Path(folder), python)
            with Server(launch, Path(folder)) as server:
                self._check(turn, peer, launch.targets)
                for level in turn.group.levels:
                    rows += [self._window(turn, peer, server, level, one) for one in turn.contender.protocols]

    def _check(self, turn: PeerTurn, peer: Peer, targets: Mapping[str, str]) -> None:
        """Check the answers once per setting in a run."""
        group, contender = turn.group, turn.contender
        if turn.key in self.checked:
            return
        chosen = list_checked_items(group.levels[0].load)
        right = self.references.of(group.workload, chosen)
        for protocol in contender.protocols:
            check(peer, group.workload, group.comparison, (protocol, targets[protocol]), chosen, right)
        self.checked.add(turn.key)

    def _window(self, turn: PeerTurn, peer: Peer, server: Server, level: LoadLevel, protocol: str) -> WindowRow:
        file = self._messages(peer, turn.group.workload, level.load, protocol)
        target = server.launch.targets[protocol]
        # The seed is the round's number, so that all compared servers get equal arrival times.
        spec = LoadSpec(protocol, target, str(file), level.concurrency, peer.grpc_method, first=turn.number)
        with Generator(spec) as generator:
            before = server.usage()
            outcome = generator.run(Window(level.seconds, level.concurrency, level.rate, level.warm_up_s))
            after = server.usage()
        if not outcome.answered:
            statuses = ", ".join(f"{count} × {status}" for status, count in outcome.rejected.items())
            told = statuses or "no answer in the window"
            raise LoadFailed(f"answered nothing at concurrency {level.concurrency} over {protocol}: {told}")
        return WindowRow(
            load=level.name,
            protocol=protocol,
            concurrency=level.concurrency,
            rps=outcome.rps,
            p50_ms=outcome.latencies.percentile_ms(50),
            p99_ms=outcome.latencies.percentile_ms(99),
            rejected=outcome.rejected,
            cpu_ms=(after.cpu_s - before.cpu_s) / max(1, outcome.sent) * 1000,
            memory_mib=after.memory_bytes / MIB,
            # `run` counts the CPU time of the warm-up, too.
            generator_share=outcome.cpu_s / (level.warm_up_s + level.seconds),
        )

    def _messages(self, peer: Peer, workload: str, load: str, protocol: str) -> Path:
        file = self.folder / f"{peer.name}-{workload}-{load}-{protocol}.messages"
        if not file.exists():
            write_messages(file, [peer.request(workload, protocol, item) for item in list_items(load)])
        return file


def _explain(error: Exception) -> str:
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
