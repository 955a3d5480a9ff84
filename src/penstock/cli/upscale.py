"""`penstock upscale`: photographs, larger."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.files import read_bytes, write_bytes
from penstock.cli.terminal.options import GRPC_ADDRESS, AsJson, GrpcAddress, Timeout
from penstock.cli.terminal.output import print_json
from penstock.cli.terminal.requests import ask_all, exit_with_problems
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.client.tasks import ImageOptions

AT_ONCE = 2
FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}  # by an output's name


@dataclass(frozen=True, slots=True)
class Enlarged:
    input: str
    output: str
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


@shows_key
def upscale(
    access: Access,
    files: Annotated[
        list[Path], typer.Argument(metavar="IN OUT", help="A JPEG or PNG file, and the PNG, JPEG or WebP to write.")
    ],
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Take all FILES and write IN's name.png here.")] = None,
    model: Annotated[str, typer.Option(help="The upscaling model.")] = "srcnn",
    format_: Annotated[
        str | None, typer.Option("--format", help="png, jpeg or webp. [default: as OUT is called, else png]")
    ] = None,
    quality: Annotated[int | None, typer.Option(help="Of jpeg and webp, 1 to 100. [default: 90]")] = None,
    resolution: Annotated[
        str | None, typer.Option(help="A factor (2x), lines (1080p, 4k) or a frame (1920x1080).")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="upscale or denoise. [default: upscale]")] = None,
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Enlarge photographs, or take their noise off: `upscale IN OUT`, or `upscale IN... --to DIR`."""
    from penstock.client import Client

    plan = _plan(files, to, format_)
    options: ImageOptions = {"quality": quality, "resolution": resolution, "mode": mode}

    def ask(paths: tuple[Path, Path]) -> Enlarged:
        return _upscale_one(client, paths, model, {**options, "format": format_ or _named(paths[1])})

    with Client(grpc, timeout, **access.options) as client:
        found = ask_all("upscaling", ask, plan, AT_ONCE)
    if as_json:
        print_json([asdict(item) for item in found])
    else:
        for item in found:
            if not item.problem:
                print(f"{item.output}: {item.bytes} bytes in {item.seconds:.2f} s")
    exit_with_problems(item.problem for item in found if item.problem)


def _named(target: Path) -> str | None:
    """The format that a file's name tells."""
    return FORMATS.get(target.suffix.lower())


def _plan(files: Sequence[Path], to: Path | None, format_: str | None = None) -> list[tuple[Path, Path]]:
    """What is read, and where the larger one goes."""
    suffix = f".{format_.lower()}" if format_ else ".png"
    if to is None:
        if len(files) != 2:
            raise InvalidRequest("say where to write: `upscale IN OUT`, or `upscale IN... --to DIR`")
        source, target = files
        return [(source, target / f"{source.stem}{suffix}" if target.is_dir() else target)]
    plan = [(source, to / f"{source.stem}{suffix}") for source in files]
    seen: dict[Path, Path] = {}
    for source, target in plan:
        if target in seen:
            raise InvalidRequest(f"{seen[target]} and {source} would both become {target}: rename one")
        seen[target] = source
    return plan


def _upscale_one(client: "Client", paths: tuple[Path, Path], model: str, options: "ImageOptions") -> Enlarged:
    """One that fails does not stop the others, but a server that is away does."""
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
        return Enlarged(str(source), str(target), problem=mark + message)
    return Enlarged(str(source), str(target), len(image), round(time.monotonic() - started, 3))
