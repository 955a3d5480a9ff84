"""Send image files through a model in order and write the results to files."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError, Unavailable
from penstock.terminal.access import NO_ACCESS, Access
from penstock.terminal.command_files import read_bytes, write_bytes
from penstock.terminal.progress import show_count

if TYPE_CHECKING:
    from penstock.client.tasks import ImageOptions

KINDS = ((b"\x89PNG", ".png"), (b"\xff\xd8", ".jpg"), (b"RIFF", ".webp"))  # the first bytes of a file and its suffix
FrameAnswers = AsyncGenerator[bytes | PenstockError, None]


@dataclass(frozen=True, slots=True)
class FrameRoute:
    """The transport, server, model and options with which frames are sent."""

    transport: str
    address: str
    model: str
    window: int
    timeout_s: float
    access: Access = NO_ACCESS
    image: "ImageOptions | None" = None


async def stream_frames(files: Sequence[Path], output: Path, route: FrameRoute) -> list[str]:
    """Send the frames, write the results, and return the problems of the frames that failed."""
    problems: list[str] = []
    answers = _stream_over_grpc(files, route) if route.transport == "grpc" else _stream_over_websocket(files, route)
    with show_count("streaming", len(files)) as count:
        async with aclosing(answers):
            number = 0
            async for answer in answers:
                number += 1
                if isinstance(answer, PenstockError):
                    problems.append(f"{files[number - 1]}: {answer.message}")
                else:
                    await asyncio.to_thread(_write_result, output, number, answer)
                count()
    return problems


async def _stream_over_grpc(files: Sequence[Path], route: FrameRoute) -> FrameAnswers:
    from penstock.client import AsyncClient
    from penstock.client.ordered_results import map_in_order

    async with AsyncClient(route.address, route.timeout_s, **route.access.options) as client:

        async def upscale(image: bytes) -> bytes | PenstockError:
            try:
                return await client.upscale(image, route.model, **(route.image or {}))
            except Unavailable:
                raise
            except PenstockError as error:
                return error

        async with aclosing(map_in_order(_read_all(files), upscale, route.window)) as answers:
            async for answer in answers:
                yield answer


def _stream_over_websocket(files: Sequence[Path], route: FrameRoute) -> FrameAnswers:
    from penstock.client.websocket import stream_raw

    return stream_raw(
        _read_all(files),
        route.model,
        route.address,
        window=route.window,
        timeout_s=route.timeout_s,
        image=route.image,
        **route.access.options,
    )


async def _read_all(files: Sequence[Path]) -> AsyncIterator[bytes]:
    for file in files:
        yield await asyncio.to_thread(read_bytes, file)


def _write_result(folder: Path, number: int, data: bytes) -> None:
    suffix = next((suffix for start, suffix in KINDS if data.startswith(start)), ".bin")
    write_bytes(folder / f"{number:06d}{suffix}", data)
