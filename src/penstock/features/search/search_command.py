"""`penstock search`: find blocks by a query."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.core.error_text import explain_cause
from penstock.core.errors import InvalidRequest
from penstock.terminal.command_files import read_bytes
from penstock.terminal.output import escape_controls, print_json, print_list
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson, Timeout

CONDITION = re.compile(r"\s*(\S+)\s+(==|!=|>=|<=|>|<|IN|LIKE)\s+(.*\S)\s*", re.S)


@takes_server
def search(
    server: Server,
    text: Annotated[
        str,
        typer.Argument(
            metavar="[TEXT]", help="Rank blocks by their descriptions' similarity to this text. [default: none]"
        ),
    ] = "",
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'VARIABLE OPERATOR VALUE'",
            help="A condition, for example 'metadata.model LIKE gpt'; all must hold. [default: none]",
        ),
    ] = None,
    query: Annotated[
        str,
        typer.Option(
            metavar="JSON|@FILE",
            help="A whole query, as in a packet's query_parameters. [default: of the other options]",
        ),
    ] = "",
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME:VERSION",
            help="Policy that ranks the blocks. [default: semantic:v1 with a TEXT, otherwise least-loaded:v1]",
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=100, help="Number of blocks to show.")] = 10,
    explain: Annotated[bool, typer.Option("--explain", help="Also show why other blocks were filtered out.")] = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Find the blocks that match a query, best first. Nothing is run."""
    from penstock.terminal.http import open_path

    body = {"query": _build_query(text, where or [], query, policy), "limit": limit, "explain": explain}
    with open_path(server.access, server.http, "/v1/search", timeout, body=json.dumps(body).encode()) as answer:
        found = json.load(answer)
    if as_json:
        print_json(found)
        return
    titles = ("rank", "block", "cluster", "model", "score", "why")
    nothing = f"none of {found['total']} blocks matches; --explain shows why"
    print_list(False, found["blocks"], titles, _table_row, nothing)
    for each in found["filtered"]:
        values = ", ".join(json.dumps(value) for value in each["found"]) or "nothing"
        print(escape_controls(f"filtered out {each['block_id']} ({each['model']}): {each['condition']}; has {values}"))


def _build_query(text: str, where: list[str], query: str, policy: str) -> Any:
    if query:
        if text or where or policy:
            raise InvalidRequest("--query is a whole query: leave out TEXT, --where and --policy")
        return _read_json(query)
    conditions = [_parse_condition(each) for each in where]
    block = {"logicalOperator": "AND", "conditions": conditions} if conditions else {}
    rule = {"policyRuleURI": policy or ("semantic:v1" if text else "least-loaded:v1")}
    return {"filter": {"blockQuery": block}, "rankingPolicyRule": rule, **({"user_query": text} if text else {})}


def _read_json(query: str) -> Any:
    content = read_bytes(Path(query[1:])) if query.startswith("@") else query.encode()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--query is not JSON: {explain_cause(error)}") from error


def _parse_condition(text: str) -> dict[str, Any]:
    found = CONDITION.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"--where {text}: write VARIABLE OPERATOR VALUE, with spaces between them")
    variable, operator, value = found.groups()
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    return {"variable": variable, "operator": operator, "value": parsed}


def _table_row(block: dict[str, Any]) -> tuple[object, ...]:
    return (
        block["rank"],
        block["block_id"],
        block["cluster_id"],
        f"{block['model']}:{block['block']['version']}",
        f"{block['score']:.3g}",
        block["reason"],
    )
