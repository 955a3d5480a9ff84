"""`penstock rollout start|status|pause|resume|undo|forget`: shift a name's traffic to another block in steps."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import InvalidRequest
from penstock.terminal.manager_options import changes_cluster, print_done, takes_manager_client
from penstock.terminal.output import escape_controls, print_list
from penstock.terminal.shared_options import AsJson, read_block_name, read_model_name

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        callback=read_model_name,
        help="The name that clients call: a model's name, the path of its folder, or any other name.",
    ),
]
START_S = 20.0  # deadline of a change


@changes_cluster
def start_rollout(
    client: "ClusterClient",
    name: Name,
    to: Annotated[
        str,
        typer.Option(
            callback=read_block_name,
            help="New block: VERSION, MODEL, MODEL:VERSION or a block id; MODEL is a name, or the path of its folder.",
        ),
    ],
    old: Annotated[
        str,
        typer.Option(
            "--from",
            callback=read_block_name,
            help="Old block, likewise. [default: the block that answers for the name now]",
        ),
    ] = "",
    steps: Annotated[
        str,
        typer.Option(metavar="PERCENT,…", help="Shares of the new block, or `none` for shadow traffic only."),
    ] = "5,25,50,100",
    hold: Annotated[float, typer.Option(min=0, help="Minimum seconds per step.")] = 60.0,
    min_answers: Annotated[int, typer.Option(min=0, help="Minimum answers of the new block per step.")] = 50,
    max_error_rate: Annotated[
        float,
        typer.Option(min=0, max=1, help="Allowed error rate above the old block's; 1 ignores errors."),
    ] = 0.02,
    max_slowdown: Annotated[
        float, typer.Option(min=0, help="Allowed latency as a multiple of the old block's; 0 ignores latency.")
    ] = 1.5,
    sticky: Annotated[
        str,
        typer.Option(
            metavar="none|session|key=PARAMETER",
            help="Send requests of one session, or with one value of PARAMETER, to the same block.",
        ),
    ] = "none",
    shadow: Annotated[
        float, typer.Option(min=0, max=100, help="Percent of requests to copy to the new block before the first step.")
    ] = 0.0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare the outputs of shadow copies with the answers.")
    ] = False,
    keep: Annotated[
        float, typer.Option(min=0, help="Seconds to keep the old block after the rollout, for sessions and undo.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Shift a name's traffic to another block gradually.

    Traffic returns to the old block automatically if the new block is worse.
    """
    kind, _, key = sticky.partition("=")
    plan = {
        "name": name,
        "new": to,
        "old": old,
        "steps": _parse_steps(steps),
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
    started = _select_displayed_fields(client.ask("StartRollout", START_S, plan=json.dumps(plan))["rollout"])
    old_name, new_name = _format_block_name(started["old"]), _format_block_name(started["new"])
    text = f"started the rollout of '{name}' from {old_name} to {new_name}"
    print_done(as_json, f"{text}; `penstock rollout status {name}` shows its progress", **started)


@takes_manager_client
def rollout_status(
    client: "ClusterClient",
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", callback=read_model_name, help="Show only the rollout of this name. [default: all]"
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the progress of rollouts.

    Shows the error rates and latencies of both blocks, and the reason for the last change.
    """
    found = [_select_displayed_fields(rollout) for rollout in client.ask("ListRollouts", name=name)["rollouts"]]
    titles = ("name", "phase", "new", "share", "step", "answers", "errors", "p50 ms", "p95 ms", "old", "waits for")
    print_list(as_json, found, titles, _make_table_row, "there are no rollouts")
    for rollout in found:
        if rollout["reason"] and not as_json:
            print(escape_controls(f"{rollout['name']}: {rollout['reason']}"))


@changes_cluster
def pause_rollout(client: "ClusterClient", name: Name, as_json: AsJson = False) -> None:
    """Pause a rollout at its current step; health checks continue."""
    changed = _call_method(client, "PauseRollout", name)
    print_done(as_json, f"paused the rollout of '{name}' at {changed['weight']:g}%", **changed)


@changes_cluster
def resume_rollout(client: "ClusterClient", name: Name, as_json: AsJson = False) -> None:
    """Resume a paused rollout.

    After a last step below 100%, all traffic shifts to the new block.
    """
    changed = _call_method(client, "ResumeRollout", name)
    print_done(as_json, f"resumed the rollout of '{name}' at {changed['weight']:g}%", **changed)


@changes_cluster
def undo_rollout(client: "ClusterClient", name: Name, as_json: AsJson = False) -> None:
    """Return all traffic to the old block."""
    changed = _call_method(client, "UndoRollout", name)
    answering = changed["old"] if changed["phase"] == "undone" else changed["new"]
    print_done(as_json, f"{_format_block_name(answering)} answers all requests for '{name}' again", **changed)


@changes_cluster
def forget_rollout(client: "ClusterClient", name: Name, as_json: AsJson = False) -> None:
    """Delete the record of a finished rollout.

    The name then resolves to the newest version of its model.
    """
    client.ask("ForgetRollout", START_S, name=name)
    print_done(as_json, f"deleted the rollout of '{name}'", name=name)


def _call_method(client: "ClusterClient", method: str, name: str) -> dict[str, Any]:
    return _select_displayed_fields(client.ask(method, START_S, name=name)["rollout"])


def _select_displayed_fields(rollout: dict[str, Any]) -> dict[str, Any]:
    return rollout | {"plan": json.loads(rollout["plan"] or "{}")}


def _parse_steps(text: str) -> list[float]:
    try:
        return [] if text == "none" else [float(part.strip().removesuffix("%")) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"invalid --steps {text}: use percentages such as 5,25,50,100, or none") from None


def _format_block_name(block: dict[str, Any]) -> str:
    return f"{block['model']}:{block['version']}"


def _make_table_row(rollout: dict[str, Any]) -> tuple[object, ...]:
    new, old = rollout["new"], rollout["old"]
    waits = [f"{rollout['missing_answers']} answers"] if rollout["missing_answers"] else []
    waits += [f"{rollout['left_s']:.0f} s"] if rollout["left_s"] else []
    return (
        rollout["name"],
        f"{rollout['phase']}, paused" if rollout["is_paused"] else rollout["phase"],
        _format_block_name(new),
        f"{rollout['weight']:g}%",
        f"{rollout['step']} of {rollout['steps']}" if rollout["step"] else "",
        rollout["answers"],
        f"{_format_percentage(new)} ({_format_percentage(old)})",
        f"{_format_ms(new['p50_s'])} ({_format_ms(old['p50_s'])})",
        f"{_format_ms(new['p95_s'])} ({_format_ms(old['p95_s'])})",
        _format_block_name(old),
        ", ".join(waits),
    )


def _format_percentage(block: dict[str, Any]) -> str:
    return f"{block['errors'] / block['outcomes']:.1%}" if block["outcomes"] else "-"


def _format_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
