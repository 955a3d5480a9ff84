"""`penstock rollout start|status|pause|resume|undo|forget`: a name moves from one block to another."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.cluster.asking import asks_managers, print_done
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import plain, print_list
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

Name = Annotated[str, typer.Argument(metavar="NAME", help="What clients call: a model, or a name of its own.")]
START_S = 20.0  # what a rollout takes to be written down


@asks_managers
def start_rollout(
    client: "ClusterClient",
    name: Name,
    to: Annotated[str, typer.Option(help="The new block: VERSION, MODEL, MODEL:VERSION or a block's id.")],
    old: Annotated[str, typer.Option("--from", help="The old one, the same way. [default: what answers now]")] = "",
    steps: Annotated[
        str, typer.Option(metavar="PERCENT,…", help="The new block's shares; none: only --shadow.")
    ] = "5,25,50,100",
    hold: Annotated[float, typer.Option(min=0, help="Seconds of each step at least.")] = 60.0,
    min_answers: Annotated[int, typer.Option(min=0, help="Answers by the new block in each step at least.")] = 50,
    max_error_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Share of failures above the old block's. 1: they do not matter.")
    ] = 0.02,
    max_slowdown: Annotated[
        float, typer.Option(min=0, help="Latency as a multiple of the old block's. 0: it does not matter.")
    ] = 1.5,
    sticky: Annotated[
        str, typer.Option(metavar="none|session|key=PARAMETER", help="Who comes again gets the same block.")
    ] = "none",
    shadow: Annotated[float, typer.Option(min=0, max=100, help="Percent of requests that are copied first.")] = 0.0,
    compare: Annotated[bool, typer.Option("--compare", help="Compare the outputs of copies.")] = False,
    keep: Annotated[float, typer.Option(min=0, help="Seconds that the old block stays afterwards.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Move a name to another block in steps; it goes back by itself where that is worse."""
    kind, _, key = sticky.partition("=")
    plan = {
        "name": name,
        "new": to,
        "old": old,
        "steps": _steps(steps),
        "hold_s": hold,
        "min_answers": min_answers,
        "max_error_rate": max_error_rate,
        "max_slowdown": max_slowdown,
        "sticky": kind,
        "key": key,
        "shadow": shadow,
        "is_compared": compare,
        "keep_s": keep,
    }
    started = _values(client.ask("StartRollout", START_S, plan=json.dumps(plan))["rollout"])
    said = f"'{name}' moves from {_block(started['old'])} to {_block(started['new'])}"
    print_done(as_json, f"{said}; `penstock rollout status {name}` shows how far it is", **started)


@asks_managers
def rollout_status(
    client: "ClusterClient",
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Of this name only.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show rollouts: how far they are, what both blocks answer, and why one ended as it did."""
    found = [_values(rollout) for rollout in client.ask("ListRollouts", name=name)["rollouts"]]
    titles = ("name", "phase", "new", "share", "step", "answers", "errors", "p50 ms", "p95 ms", "old", "waits for")
    print_list(as_json, found, titles, _row, "there is no rollout")
    for rollout in found:
        if rollout["reason"] and not as_json:
            print(plain(f"{rollout['name']}: {rollout['reason']}"))


@asks_managers
def pause_rollout(client: "ClusterClient", name: Name, as_json: AsJson = False) -> None:
    """Keep a rollout at its step; it is watched on."""
    changed = _change(client, "PauseRollout", name)
    print_done(as_json, f"the rollout of '{name}' is paused at {changed['weight']:g}%", **changed)


@asks_managers
def resume_rollout(client: "ClusterClient", name: Name, as_json: AsJson = False) -> None:
    """Let a rollout go on; one that stays at its last step goes to all."""
    changed = _change(client, "ResumeRollout", name)
    print_done(as_json, f"the rollout of '{name}' goes on at {changed['weight']:g}%", **changed)


@asks_managers
def undo_rollout(client: "ClusterClient", name: Name, as_json: AsJson = False) -> None:
    """Have the old block answer again."""
    changed = _change(client, "UndoRollout", name)
    answering = changed["old"] if changed["phase"] == "undone" else changed["new"]
    print_done(as_json, f"{_block(answering)} answers for '{name}' again", **changed)


@asks_managers
def forget_rollout(client: "ClusterClient", name: Name, as_json: AsJson = False) -> None:
    """Make a name what it is without the rollout that is over."""
    client.ask("ForgetRollout", START_S, name=name)
    print_done(as_json, f"the rollout of '{name}' is forgotten", name=name)


def _change(client: "ClusterClient", method: str, name: str) -> dict[str, Any]:
    return _values(client.ask(method, START_S, name=name)["rollout"])


def _values(rollout: dict[str, Any]) -> dict[str, Any]:
    return rollout | {"plan": json.loads(rollout["plan"] or "{}")}


def _steps(text: str) -> list[float]:
    try:
        return [] if text == "none" else [float(part.strip().removesuffix("%")) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"--steps {text}: write percentages like 5,25,50,100, or none") from None


def _block(block: dict[str, Any]) -> str:
    return f"{block['model']}:{block['version']}"


def _row(rollout: dict[str, Any]) -> tuple[object, ...]:
    new, old = rollout["new"], rollout["old"]
    waits = [f"{rollout['missing_answers']} answers"] if rollout["missing_answers"] else []
    waits += [f"{rollout['left_s']:.0f} s"] if rollout["left_s"] else []
    return (
        rollout["name"],
        f"{rollout['phase']}, paused" if rollout["is_paused"] else rollout["phase"],
        _block(new),
        f"{rollout['weight']:g}%",
        f"{rollout['step']} of {rollout['steps']}" if rollout["step"] else "",
        rollout["answers"],
        f"{_share(new)} ({_share(old)})",
        f"{_ms(new['p50_s'])} ({_ms(old['p50_s'])})",
        f"{_ms(new['p95_s'])} ({_ms(old['p95_s'])})",
        _block(old),
        ", ".join(waits),
    )


def _share(block: dict[str, Any]) -> str:
    return f"{block['errors'] / block['outcomes']:.1%}" if block["outcomes"] else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
