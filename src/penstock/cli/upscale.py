"""`penstock upscale`: photographs, larger."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.options import GRPC_ADDRESS, AsJson, GrpcAddress, Timeout
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable

if TYPE_CHECKING:
    from penstock.client import Client

CONCURRENCY = 2


@dataclass(frozen=True, slots=True)
class Job:
    source: Path
    target: Path


@dataclass(frozen=True, slots=True)
class Done:
    input: str
    output: str
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


def register(app: typer.Typer) -> None:
    app.command()(upscale)


def upscale(
    files: Annotated[list[Path], typer.Argument(metavar="IN OUT", help="A JPEG or PNG file, and the PNG to write.")],
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Take all FILES and write IN's name.png here.")] = None,
    model: Annotated[str, typer.Option(help="The upscaling model.")] = "srcnn",
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Enlarge photographs: `upscale IN OUT`, or `upscale IN... --to DIR`."""
    from penstock.cli.terminal.progress import show_progress
    from penstock.client import Client

    jobs = _plan(files, to)
    with Client(grpc, timeout) as client:
        done = list(show_progress("upscaling", _run(client, jobs, model), len(jobs)))
    if as_json:
        print(json.dumps([asdict(item) for item in done], indent=2))
    for item in done:
        if item.problem:
            print(f"penstock: {item.problem}", file=sys.stderr)
        elif not as_json:
            print(f"{item.output}: {item.bytes} bytes in {item.seconds:.2f} s")
    if any(item.problem for item in done):
        sys.exit(2)


def _plan(files: Sequence[Path], to: Path | None) -> list[Job]:
    if to is None:
        if len(files) != 2:
            raise InvalidRequest("say where to write: `upscale IN OUT`, or `upscale IN... --to DIR`")
        source, target = files
        return [Job(source, target / f"{source.stem}.png" if target.is_dir() else target)]
    jobs = [Job(source, to / f"{source.stem}.png") for source in files]
    seen: dict[Path, Path] = {}
    for job in jobs:
        if job.target in seen:
            raise InvalidRequest(f"{seen[job.target]} and {job.source} would both become {job.target}: rename one")
        seen[job.target] = job.source
    return jobs


def _run(client: "Client", jobs: Sequence[Job], model: str) -> Iterator[Done]:
    """In the order of `jobs`; one that fails does not stop the others, but a server that is away does."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        try:
            yield from pool.map(lambda job: _upscale_one(client, job, model), jobs)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _upscale_one(client: "Client", job: Job, model: str) -> Done:
    started = time.monotonic()
    try:
        image = client.upscale(_read(job.source), model)
        _write(job.target, image)
    except Unavailable:
        raise
    except PenstockError as error:
        message = error.message.removeprefix("input 'image' element 0: ")
        mark = "" if message.startswith((str(job.source), str(job.target))) else f"{job.source}: "
        return Done(str(job.source), str(job.target), problem=mark + message)
    return Done(str(job.source), str(job.target), len(image), round(time.monotonic() - started, 3))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be read: {error.strerror}") from error


def _write(file: Path, data: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be written: {error.strerror}") from error
