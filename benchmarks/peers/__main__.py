"""`benchmarks/peers/run`: measures Penstock and its peers in turns and writes a report."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers import roster
from benchmarks.peers.ceilings import Ceilings
from benchmarks.peers.checks import References
from benchmarks.peers.figures import compute_named_figures
from benchmarks.peers.items import find_assets
from benchmarks.peers.plan import (
    CEILING,
    CONCURRENCIES,
    GROUPS,
    SERVERS,
    Group,
    PeerTurn,
    is_done,
    keep,
    make_search_group,
    plan_open_turns,
    plan_turns,
)
from benchmarks.peers.progress import Progress
from benchmarks.peers.results import PeerResults
from benchmarks.peers.roster import Entrant
from benchmarks.peers.search import Choice
from benchmarks.peers.stage import Stage
from benchmarks.peers.summary import summarize
from benchmarks.peers.table import render
from benchmarks.processors import processors
from penstock.telemetry.machine import describe_machine

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SETTINGS = HERE / "settings.json"
QUICK = 0.5  # length of the windows


def main() -> int:
    options = _parse()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # otherwise servers would continue to run
    servers, groups = _choose(options.only)
    scale = options.scale * (QUICK if options.quick else 1.0)
    rounds = options.rounds or (1 if options.quick else 0)
    groups = [_fit_group(group, scale, rounds, options.callers) for group in groups]
    # The peers' handlers find each other here by their bare names; so does the reference.
    sys.path.insert(0, str(HERE / "shared"))
    assets = find_assets(ROOT)
    entrants = {name: roster.load_entrant(name) for name in servers}
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        stage = Stage(assets, References(assets), Path(folder))
        if options.tune:
            _tune(stage, groups, entrants, rounds or 1, options)
            return 0
        results = _measure(stage, Ceilings(assets.minilm.parent), groups, entrants, scale, options)
    report = render(results)
    print(report)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(report)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/peers/run", description=__doc__)
    names = ", ".join([*SERVERS, *(group.name for group in GROUPS)])
    parser.add_argument(
        "--only", action="append", default=[], help=f"servers or groups to measure, may be repeated: {names}"
    )
    parser.add_argument("--quick", action="store_true", help="measure one round with windows of half the length")
    parser.add_argument("--rounds", type=int, help="number of rounds of every group")
    parser.add_argument("--tune", action="store_true", help=f"search each server's best setting into {SETTINGS.name}")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the results in the JSON file, or from the search"
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "bench-out" / "peers.json", help="file for the results of all rounds"
    )
    parser.add_argument("--markdown", type=Path, help="also write the report to this file")
    parser.add_argument("--settings", type=Path, default=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument("--callers", type=int, action="append", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def _choose(only: Sequence[str]) -> tuple[list[str], list[Group]]:
    """Return the chosen servers and groups; all if none is named."""
    names = [name for part in only for name in part.split(",") if name]
    known = {*SERVERS, *(group.name for group in GROUPS)}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"--only knows {', '.join(sorted(known))}; not {', '.join(unknown)}")
    servers = [name for name in SERVERS if name in names] or list(SERVERS)
    groups = [group for group in GROUPS if group.name in names] or list(GROUPS)
    return servers, groups


def _fit_group(group: Group, scale: float, rounds: int, callers: Sequence[int]) -> Group:
    levels = tuple(level.scaled(scale) for level in group.levels if level.concurrency in (callers or CONCURRENCIES))
    return replace(group, levels=levels, rounds=rounds or group.rounds)


def _measure(
    stage: Stage,
    ceilings: Ceilings,
    groups: Sequence[Group],
    entrants: dict[str, Entrant],
    scale: float,
    options: argparse.Namespace,
) -> PeerResults:
    choice = Choice.load(options.settings)
    planned = plan_turns(
        groups, {group.name: roster.contenders(group, list(entrants.values()), choice) for group in groups}
    )
    results = _load_results(options, scale, planned)
    progress = Progress(planned)
    for turn in _add_open_turns(groups, planned, results, progress):
        if is_done(turn, results.records):
            progress.end(turn, None)
            continue
        progress.begin(turn)
        server = turn.contender.server
        record = ceilings.perform(turn) if server == CEILING else stage.perform(turn, entrants[server])
        results.records.append(record)
        results.figures = {key: found.value for key, found in compute_named_figures(summarize(results.records)).items()}
        results.processors = {name: processors() for name in results.figures}
        results.save(options.json)
        progress.end(turn, record)
    return results


def _add_open_turns(
    groups: Sequence[Group], planned: Sequence[PeerTurn], results: PeerResults, progress: Progress
) -> Iterator[PeerTurn]:
    """Return the planned turns, followed by the turns that depend on their results."""
    yield from planned
    following = plan_open_turns(groups, planned, results.records)
    progress.add(following)
    yield from following


def _load_results(options: argparse.Namespace, scale: float, planned: Sequence[PeerTurn]) -> PeerResults:
    file = options.json
    if options.resume and file.exists():
        found = PeerResults.load(file)
        if found.scale != scale:
            sys.exit(f"{file} has windows of another length: run without --resume, or with the same --quick")
        found.records = keep(found.records, planned)
        return found
    if file.exists():
        file.replace(file.with_suffix(".previous.json"))
    return PeerResults(scale, machine=describe_machine())


def _tune(
    stage: Stage, groups: Sequence[Group], entrants: dict[str, Entrant], rounds: int, options: argparse.Namespace
) -> None:
    choice = Choice.load(options.settings)
    planned = []
    for group in [group for group in groups if not group.open_levels]:  # those take what was found for another
        found = {name: roster.candidates(group, entrant) for name, entrant in entrants.items()}
        for name, candidates in found.items():
            kept = [one for one in candidates if options.resume and choice.has(group.name, one, rounds)]
            choice.forget(group.name, name, kept)
            found[name] = [one for one in candidates if one not in kept]
        once = replace(make_search_group(group), rounds=rounds)
        planned += plan_turns([once], {group.name: [one for candidates in found.values() for one in candidates]})
    progress = Progress(planned)
    for turn in planned:
        progress.begin(turn)
        record = stage.perform(turn, entrants[turn.contender.server])
        if turn.contender.setting is not None:
            choice.add(turn.contender, record)
            choice.save(options.settings)
        progress.end(turn, record)


if __name__ == "__main__":
    sys.exit(main())
