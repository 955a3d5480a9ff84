"""Frames from files through a model and into files again, in order."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.terminal.progress import show_count
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable

KINDS = ((b"\x89PNG", ".png"), (b"\xff\xd8", ".jpg"))  # by how a file begins
Answers = AsyncGenerator[bytes | PenstockError, None]


@dataclass(frozen=True, slots=True)
class Way:
    """How the frames travel."""

    transport: str
    address: str
    model: str
    window: int
    timeout_s: float


async def stream_frames(files: Sequence[Path], output: Path, way: Way) -> list[str]:
    """Returns what went wrong with single frames; the others are written."""
    problems: list[str] = []
    answers = _over_grpc(files, way) if way.transport == "grpc" else _over_websocket(files, way)
    with show_count("streaming", len(files)) as count:
        async with aclosing(answers):
            number = 0
            async for answer in answers:
                number += 1
                if isinstance(answer, PenstockError):
                    problems.append(f"{files[number - 1]}: {answer.message}")
                else:
                    await asyncio.to_thread(_write, output, number, answer)
                count()
    return problems


async def _over_grpc(files: Sequence[Path], way: Way) -> Answers:
    from penstock.client import AsyncClient
    from penstock.client.ordered import in_order

    async with AsyncClient(way.address, way.timeout_s) as client:

        async def upscale(image: bytes) -> bytes | PenstockError:
            try:
                return await client.upscale(image, way.model)
            except Unavailable:
                raise
            except PenstockError as error:
                return error

        async with aclosing(in_order(_read_all(files), upscale, way.window)) as answers:
            async for answer in answers:
                yield answer


def _over_websocket(files: Sequence[Path], way: Way) -> Answers:
    from penstock.client.websocket import stream_raw

    return stream_raw(_read_all(files), way.model, way.address, window=way.window, timeout_s=way.timeout_s)


async def _read_all(files: Sequence[Path]) -> AsyncIterator[bytes]:
    for file in files:
        try:
            data = await asyncio.to_thread(file.read_bytes)
        except OSError as error:
            raise InvalidRequest(f"{file}: cannot be read: {error.strerror}") from error
        yield data


def _write(folder: Path, number: int, data: bytes) -> None:
    suffix = next((suffix for start, suffix in KINDS if data.startswith(start)), ".bin")
    file = folder / f"{number:06d}{suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be written: {error.strerror}") from error
