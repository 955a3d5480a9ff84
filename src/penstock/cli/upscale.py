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

AT_ONCE = 2


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
    files: Annotated[list[Path], typer.Argument(metavar="IN OUT", help="A JPEG or PNG file, and the PNG to write.")],
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Take all FILES and write IN's name.png here.")] = None,
    model: Annotated[str, typer.Option(help="The upscaling model.")] = "srcnn",
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Enlarge photographs: `upscale IN OUT`, or `upscale IN... --to DIR`."""
    from penstock.client import Client

    plan = _plan(files, to)
    with Client(grpc, timeout, **access.options) as client:
        found = ask_all("upscaling", lambda paths: _upscale_one(client, *paths, model), plan, AT_ONCE)
    if as_json:
        print_json([asdict(item) for item in found])
    else:
        for item in found:
            if not item.problem:
                print(f"{item.output}: {item.bytes} bytes in {item.seconds:.2f} s")
    exit_with_problems(item.problem for item in found if item.problem)


def _plan(files: Sequence[Path], to: Path | None) -> list[tuple[Path, Path]]:
    """What is read, and where the larger one goes."""
    if to is None:
        if len(files) != 2:
            raise InvalidRequest("say where to write: `upscale IN OUT`, or `upscale IN... --to DIR`")
        source, target = files
        return [(source, target / f"{source.stem}.png" if target.is_dir() else target)]
    plan = [(source, to / f"{source.stem}.png") for source in files]
    seen: dict[Path, Path] = {}
    for source, target in plan:
        if target in seen:
            raise InvalidRequest(f"{seen[target]} and {source} would both become {target}: rename one")
        seen[target] = source
    return plan


def _upscale_one(client: "Client", source: Path, target: Path, model: str) -> Enlarged:
    """One that fails does not stop the others, but a server that is away does."""
    started = time.monotonic()
    try:
        image = client.upscale(read_bytes(source), model)
        write_bytes(target, image)
    except Unavailable:
        raise
    except PenstockError as error:
        message = error.message.removeprefix("input 'image' element 0: ")
        mark = "" if message.startswith((str(source), str(target))) else f"{source}: "
        return Enlarged(str(source), str(target), problem=mark + message)
    return Enlarged(str(source), str(target), len(image), round(time.monotonic() - started, 3))
