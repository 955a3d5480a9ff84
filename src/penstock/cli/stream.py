"""`penstock stream`: the frames of a video through a model, in order."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.options import GRPC_ADDRESS, HTTP_ADDRESS, AsJson, GrpcAddress, HttpAddress, Timeout
from penstock.cli.terminal.output import print_json
from penstock.cli.terminal.requests import exit_with_problems
from penstock.core.errors import InvalidRequest

TRANSPORTS = ("grpc", "websocket")
PICTURES = (".jpg", ".jpeg", ".png")


@shows_key
def stream(
    access: Access,
    frames: Annotated[
        list[Path], typer.Argument(metavar="FRAME", help="JPEG or PNG files in their order, or folders of them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where 000001.png and so on go.")],
    model: Annotated[str, typer.Option(help="A model from `image` to `image`.")] = "srcnn",
    transport: Annotated[str, typer.Option(help="grpc or websocket.")] = "grpc",
    window: Annotated[int, typer.Option(min=1, max=256, help="Frames on their way at once.")] = 8,
    grpc: GrpcAddress = GRPC_ADDRESS,
    http: HttpAddress = HTTP_ADDRESS,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Send frames through a model and keep their order: `stream frames/ --output larger/`."""
    if transport not in TRANSPORTS:
        raise InvalidRequest(f"--transport {transport}: there are {', '.join(TRANSPORTS)}")
    files = find_frames(frames)
    import asyncio

    from penstock.cli.terminal.frames import FrameRoute, stream_frames

    route = FrameRoute(transport, grpc if transport == "grpc" else http, model, window, timeout, access)
    started = time.monotonic()
    problems = asyncio.run(stream_frames(files, output, route))
    _report(len(files), problems, time.monotonic() - started, as_json)
    exit_with_problems(problems)


def find_frames(given: Sequence[Path]) -> list[Path]:
    """Files as they are given; a folder's pictures by name, 2.png before 10.png."""
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            pictures = [file for file in path.iterdir() if file.suffix.lower() in PICTURES]
            if not pictures:
                raise InvalidRequest(f"{path}: has no {', '.join(PICTURES)} files")
            found += sorted(pictures, key=_natural)
        elif path.is_file():
            found.append(path)
        else:
            raise InvalidRequest(f"{path}: there is no such file or folder")
    return found


def _natural(file: Path) -> list[str | int]:
    return [int(part) if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", file.name))]


def _report(count: int, problems: Sequence[str], seconds: float, as_json: bool) -> None:
    done = count - len(problems)
    if as_json:
        facts = {"frames": count, "failed": len(problems), "seconds": round(seconds, 3)}
        print_json({**facts, "frames_per_s": round(done / seconds, 2), "problems": list(problems)})
    else:
        print(f"{done} frames in {seconds:.2f} s: {done / seconds:.1f} frames/s")
