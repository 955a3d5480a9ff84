"""`penstock upscale`: enlarge or denoise images."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import InvalidRequest, PenstockError, Unavailable
from penstock.terminal.command_files import read_bytes, write_bytes
from penstock.terminal.output import print_json
from penstock.terminal.request_sender import ask_all, exit_with_problems
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import (
    AsJson,
    ImageFormat,
    ImageMode,
    ImageQuality,
    ImageResolution,
    Timeout,
    read_model_name,
)

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.client.tasks import ImageOptions

CONCURRENCY = 2
FORMATS = {
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".webp": "webp",
}  # by an output's suffix


@dataclass(frozen=True, slots=True)
class EnlargedImage:
    input: str
    output: str
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


@takes_server
def upscale(
    server: Server,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="IN OUT", help="A JPEG or PNG file, and the PNG, JPEG or WebP file to write."),
    ],
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results; all arguments are then input files. [default: none]"),
    ] = None,
    model: Annotated[str, typer.Option(callback=read_model_name, help="The upscaling model.")] = "srcnn",
    format_: ImageFormat = None,
    quality: ImageQuality = None,
    resolution: ImageResolution = None,
    mode: ImageMode = None,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Enlarge or denoise images.

    Give one image and its result (`upscale IN OUT`) or several images (`upscale IN... --to DIR`).
    """
    from penstock.client import Client

    plan = _plan_files(files, to, format_)
    options: ImageOptions = {"quality": quality, "resolution": resolution, "mode": mode}

    def ask(paths: tuple[Path, Path]) -> EnlargedImage:
        return _upscale_one(client, paths, model, {**options, "format": format_ or _find_format(paths[1])})

    with Client(server.grpc, timeout, **server.access.options) as client:
        found = ask_all("upscaling", ask, plan, CONCURRENCY)
    if as_json:
        print_json([asdict(item) for item in found])
    else:
        for item in found:
            if not item.problem:
                print(f"{item.output}: {item.bytes} bytes in {item.seconds:.2f} s")
    exit_with_problems(item.problem for item in found if item.problem)


def _find_format(target: Path) -> str | None:
    """Return the image format of a file name, or None if its suffix is unknown."""
    return FORMATS.get(target.suffix.lower())


def _plan_files(files: Sequence[Path], to: Path | None, format_: str | None = None) -> list[tuple[Path, Path]]:
    """Return pairs of an input file and its output file."""
    suffix = f".{format_.lower()}" if format_ else ".png"
    if to is None:
        if len(files) != 2:
            raise InvalidRequest("expected two files, or --to: `upscale IN OUT` or `upscale IN... --to DIR`")
        source, target = files
        if target.suffix and not (format_ or target.is_dir() or _find_format(target)):
            known = ", ".join(FORMATS)
            raise InvalidRequest(f"{target}: cannot write {target.suffix} files; choose {known} or --format")
        return [(source, target / f"{source.stem}{suffix}" if target.is_dir() else target)]
    plan = [(source, to / f"{source.stem}{suffix}") for source in files]
    seen: dict[Path, Path] = {}
    for source, target in plan:
        if target in seen:
            raise InvalidRequest(f"{seen[target]} and {source} would both be written to {target}: rename one of them")
        seen[target] = source
    return plan


def _upscale_one(client: "Client", paths: tuple[Path, Path], model: str, options: "ImageOptions") -> EnlargedImage:
    """Upscale one image. Return a failure as the result's problem, but raise `Unavailable`, which ends the command."""
    source, target = paths
    started = time.monotonic()
    try:
        image = client.upscale(read_bytes(source), model, **options)
        write_bytes(target, image)
    except Unavailable:
        raise
    except PenstockError as error:
        message = error.message.removeprefix("input 'image' element 0: ")
        mark = "" if message.startswith((str(source), str(target))) else f"{source}: "
        return EnlargedImage(str(source), str(target), problem=mark + message)
    return EnlargedImage(str(source), str(target), len(image), round(time.monotonic() - started, 3))
