"""`penstock model load|reload|unload`: the models that a server serves from its folder."""

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer

from penstock.core.blocks import SERVABLE, BlockState
from penstock.core.errors import UnknownModel
from penstock.terminal.http import open_path
from penstock.terminal.manager_options import print_done, print_if_slow
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson, read_model_name

MODELS = "/v1/admin/models"
STATUS, STATUS_S = "/v1/status", 10.0
STATES = {BlockState.DORMANT: "loads on first request"}  # shown in place of a block's state
NOT_DEPLOYED = "not deployed"
ModelName = Annotated[
    str,
    typer.Argument(callback=read_model_name, help="Name of a model in the server's folder, or the path of its folder."),
]
Wait = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds to wait until every worker has loaded the model.")
]


@takes_server
def load_model(server: Server, model: ModelName, timeout: Wait = 600.0, as_json: AsJson = False) -> None:
    """Load a model from the server's folder.

    Loads the versions that are in the folder now. Earlier versions serve until the new ones are loaded.
    """
    _load_and_wait(server, model, timeout, as_json)


@takes_server
def reload_model(server: Server, model: ModelName, timeout: Wait = 600.0, as_json: AsJson = False) -> None:
    """Load a served model again after its files changed.

    The files that were loaded before serve until the new ones are loaded.
    """
    state, _ = list_states(server).get(model, (NOT_DEPLOYED, ""))
    if state in (NOT_DEPLOYED, BlockState.UNLOADED):
        raise UnknownModel(f"model '{model}' is {state}: use `penstock model load {model}`")
    _load_and_wait(server, model, timeout, as_json)


@takes_server
def unload_model(
    server: Server,
    model: ModelName,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait until its requests are complete.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Unload a model until it is loaded again, also after restarts."""
    found = _post_change(server, model, "unload", timeout)
    print_done(as_json, f"{model} is unloaded; `penstock model load {model}` loads it", **found)
    server.print_changed()


def list_states(server: Server) -> dict[str, tuple[str, str]]:
    """Return the state of each model of a server, and the problems of its versions."""
    with open_path(server.access, server.http, STATUS, STATUS_S) as answer:
        blocks = json.load(answer)["blocks"]
    return summarize(blocks)


def summarize(blocks: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return, by model, the state of its serving or otherwise its newest version, and the problems of all versions."""
    found: dict[str, tuple[str, str]] = {}
    for block in sorted(blocks, key=lambda block: (block["state"] in SERVABLE, int(block["version"]))):
        model, state, reason = block["model"], block["state"], block["reason"]
        _, problems = found.get(model, ("", ""))
        if reason and state != BlockState.UNLOADED:
            text = f"version {block['version']} {'failed: ' if state == BlockState.FAILED else ''}{reason}"
            problems = f"{problems}; {text}" if problems else text
        found[model] = STATES.get(state, state), problems
    return found


def _load_and_wait(server: Server, model: str, timeout_s: float, as_json: bool) -> None:
    with print_if_slow(f"waiting at most {timeout_s:g} s until every worker has loaded {model}"):
        found = _post_change(server, model, "load", timeout_s)
    versions = [block["spec"]["version"] for block in found["blocks"] if block["role"] == "chosen"]
    print_done(as_json, f"{model} is loaded: version {', '.join(versions)}", **found)
    server.print_changed()


def _post_change(server: Server, model: str, verb: str, timeout_s: float) -> dict[str, Any]:
    path = f"{MODELS}/{quote(model, safe='')}/{verb}"
    with open_path(server.access, server.http, path, timeout_s, method="POST") as answer:
        found: dict[str, Any] = json.load(answer)
    return found
