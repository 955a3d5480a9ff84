"""`penstock block infer`: send one packet of the block protocol."""

import base64
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.core.errors import InvalidRequest
from penstock.terminal.command_files import read_bytes, write_bytes
from penstock.terminal.output import escape_controls, print_json
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson, Timeout

MODE, ASYNC = "mode", "async"


@takes_server
def infer_block(
    server: Server,
    block: Annotated[
        str, typer.Argument(metavar="[BLOCK]", help="Block id or model. [default: the one that --query selects]")
    ] = "",
    data: Annotated[
        str, typer.Option("--data", "-d", metavar="JSON|@FILE", help="The packet's data. [default: none]")
    ] = "",
    files: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="A file of the packet; may be repeated. [default: none]")
    ] = None,
    session: Annotated[str, typer.Option("--session", help="Session of the packet.")] = "cli",
    seq_no: Annotated[int, typer.Option("--seq-no", min=0, help="Number of the packet in its session.")] = 0,
    query: Annotated[
        str, typer.Option("--query", metavar="JSON|@FILE", help="Search query that selects the block. [default: none]")
    ] = "",
    is_async: Annotated[bool, typer.Option("--async", help="Print the id of the request without waiting.")] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", help="Folder for the answer's files. [default: print their sizes]"),
    ] = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Send a packet to a block, and print the answer."""
    from penstock.terminal.http import open_path

    if not block and not query:
        raise InvalidRequest("give a BLOCK, or --query to select one")
    body: dict[str, Any] = {"session_id": session, "seq_no": seq_no, "data": _read_option(data)}
    body |= {"block_id": block} if block else {"selection_query": _read_option(query)}
    body["files"] = [
        {"metadata": {"file_name": file.name}, "file_data": base64.b64encode(read_bytes(file)).decode()}
        for file in files or ()
    ]
    if is_async:
        body[MODE] = ASYNC
    with open_path(server.access, server.http, "/v1/infer", timeout, body=json.dumps(body).encode()) as answer:
        found = json.load(answer)
    if as_json or is_async:
        print_json(found)
        return
    print_json(found["data"])
    for index, file in enumerate(found["files"]):
        _print_file(index, file, output_dir)


def _read_option(option: str) -> str:
    """Return an option's text, or for `@FILE` the text of the file."""
    if not option.startswith("@"):
        return option
    try:
        return read_bytes(Path(option[1:])).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{option[1:]}: not UTF-8 text") from error


def _print_file(index: int, file: dict[str, Any], folder: Path | None) -> None:
    content = base64.b64decode(file["file_data"])
    metadata = escape_controls(json.dumps(file["metadata"]))
    target = ""
    if folder is not None:
        name = Path(str(file["metadata"].get("file_name") or "")).name or f"file-{index}"
        write_bytes(folder / name, content)
        target = f" -> {escape_controls(str(folder / name))}"
    print(f"file {index}: {len(content)} bytes {metadata}{target}")
