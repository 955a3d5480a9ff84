"""`python -m tests.chaos`: runs the fault scenarios and reports which figures miss their required bounds."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvloop
from rich.console import Console

from penstock.telemetry.machine import describe_machine
from tests.chaos import (
    departures,
    drain,
    generation,
    kill,
    malformed,
    overload,
    reload,
    rollout,
    sessions,
    slow_reader,
)
from tests.chaos.access import run as access
from tests.chaos.attack import run as attack
from tests.chaos.cluster import run as cluster
from tests.chaos.edge import run as edge
from tests.chaos.global_server import run as global_server
from tests.chaos.report import ChaosPlan, Result, Scenario, print_table

STDOUT, STDERR = 1, 2
SCENARIOS: Mapping[str, Scenario] = {
    "kill": kill.run,
    "stop": departures.stop,
    "hand_back": departures.hand_back,
    "drain": drain.run,
    "overload": overload.run,
    "malformed": malformed.run,
    "sessions": sessions.run,
    "reload": reload.run,
    "rollout": rollout.run,
    "slow_reader": slow_reader.run,
    "attack": attack.run,
    "cluster": cluster.run,
    "access": access.run,
    "edge": edge.run,
    "generation": generation.run,
    "global": global_server.run,
}


def main() -> int:
    options = _parse()
    console = Console(stderr=True)
    results: list[tuple[str, Result]] = []
    before = {**describe_machine(), "load_average": os.getloadavg()}
    for name in options.only or SCENARIOS:
        started = time.monotonic()
        console.print(f"[bold]{name}[/]")
        with tempfile.TemporaryDirectory(prefix=f"penstock-chaos-{name}-") as folder:
            plan = ChaosPlan(
                options.models,
                Path(folder),
                options.quick,
                lambda line: console.print(f"  {line}"),
                tuple(options.attack) or ("",),
                options.malformed,
            )
            with _redirect_output():
                result = uvloop.run(SCENARIOS[name](plan))
        result.details["seconds"] = round(time.monotonic() - started, 1)
        results.append((name, result))
    print_table(results, console if options.json == "-" else Console())
    if options.json:
        text = json.dumps(_format_json(results, before), indent=2) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
    return 1 if any(result.missed() for _, result in results) else 0


@contextmanager
def _redirect_output() -> Iterator[None]:
    """Send the output of scenarios and their processes to standard error."""
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, STDOUT)
        os.close(kept)


def _parse_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(SCENARIOS)):
        raise argparse.ArgumentTypeError(f"there is no scenario '{unknown[0]}': choose from {', '.join(SCENARIOS)}")
    return names


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter faults: all scenarios in five minutes")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write figures, details and machine to this file, or print them",
    )
    parser.add_argument(
        "--only",
        action="extend",
        type=_parse_names,
        metavar="NAME[,NAME...]",
        help=f"these scenarios; may be repeated: {', '.join(SCENARIOS)}",
    )
    parser.add_argument(
        "--attack",
        action="append",
        default=[],
        metavar="TEXT",
        help="of the attacks, or of the faults of cluster and access, those whose names have this in them; "
        "may be repeated",
    )
    parser.add_argument("--malformed", type=int, default=0, metavar="N", help="send this many malformed messages")
    parser.add_argument("--models", type=Path, default=Path("models"), help="model repository with minilm and srcnn")
    return parser.parse_args()


def _format_json(results: list[tuple[str, Result]], before: Mapping[str, object]) -> dict[str, object]:
    return {
        "figures": {figure: value for _, result in results for figure, value in result.figures.items()},
        "meanings": {figure: text for _, result in results for figure, text in result.meanings.items()},
        "missed": [f"{bar.figure} {bar}" for _, result in results for bar in result.missed()],
        "details": {name: result.details for name, result in results},
        "machine": before,
    }


if __name__ == "__main__":
    sys.exit(main())
