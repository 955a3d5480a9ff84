"""`penstock stream`: send the frames of a video through a model in order."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import InvalidRequest
from penstock.terminal.output import print_json
from penstock.terminal.request_sender import exit_with_problems
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import (
    AsJson,
    ImageMode,
    ImageQuality,
    ImageResolution,
    Timeout,
    read_model_name,
)

if TYPE_CHECKING:
    from penstock.client.tasks import ImageOptions

TRANSPORTS = ("grpc", "websocket")
StreamFormat = Annotated[
    str | None, typer.Option("--format", help="Format of the results: png, jpeg or webp. [default: png]")
]
PICTURES = (".jpg", ".jpeg", ".png")


@takes_server
def stream(
    server: Server,
    frames: Annotated[
        list[Path], typer.Argument(metavar="FRAME", help="JPEG or PNG files in order, or folders of such files.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results: 000001.png, 000002.png, ….")
    ],
    model: Annotated[
        str, typer.Option(callback=read_model_name, help="A model with an input and an output called `image`.")
    ] = "srcnn",
    format_: StreamFormat = None,
    quality: ImageQuality = None,
    resolution: ImageResolution = None,
    mode: ImageMode = None,
    transport: Annotated[str, typer.Option(help="Transport of the frames: grpc or websocket.")] = "grpc",
    window: Annotated[int, typer.Option(min=1, max=256, help="Maximum number of frames in flight.")] = 8,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Send the frames of a video through a model in order."""
    if transport not in TRANSPORTS:
        raise InvalidRequest(f"--transport {transport}: choose one of {', '.join(TRANSPORTS)}")
    files = find_frames(frames)
    import asyncio

    from penstock.terminal.media import FrameRoute, stream_frames

    address = server.grpc if transport == "grpc" else server.http
    image: ImageOptions = {"format": format_, "quality": quality, "resolution": resolution, "mode": mode}
    route = FrameRoute(transport, address, model, window, timeout, server.access, image)
    started = time.monotonic()
    problems = asyncio.run(stream_frames(files, output, route))
    _print_summary(len(files), problems, time.monotonic() - started, as_json)
    exit_with_problems(problems)


def find_frames(paths: Sequence[Path]) -> list[Path]:
    """Return files in the given order. Images of a folder are sorted by name, with 2.png before 10.png."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            pictures = [file for file in path.iterdir() if file.suffix.lower() in PICTURES]
            if not pictures:
                raise InvalidRequest(f"{path}: no {', '.join(PICTURES)} files in this folder")
            found += sorted(pictures, key=_natural_sort_key)
        elif path.is_file():
            found.append(path)
        else:
            raise InvalidRequest(f"{path}: no such file or folder")
    return found


def _natural_sort_key(file: Path) -> list[str | int]:
    return [int(part) if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", file.name))]


def _print_summary(count: int, problems: Sequence[str], seconds: float, as_json: bool) -> None:
    done = count - len(problems)
    if as_json:
        facts = {"frames": count, "failed": len(problems), "seconds": round(seconds, 3)}
        print_json({**facts, "frames_per_s": round(done / seconds, 2), "problems": list(problems)})
    else:
        print(f"{done} frames in {seconds:.2f} s: {done / seconds:.1f} frames/s")
