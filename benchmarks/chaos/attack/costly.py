"""Small or legal requests that are dear to read: many elements, many scans, long words, large pictures."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO

import grpc
from PIL import Image

from benchmarks.chaos.attack.strike import Attack, Scene
from benchmarks.chaos.calls import code_of, infer_request, text_request
from benchmarks.chaos.repository import LOOSE
from penstock.core.tensors import pack_bytes
from penstock.models.samples.photos import photos
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub

ELEMENTS = 10_000_000
SIDE = 5_000  # 25 megapixels, what upscale takes at most
SCANS = 1_200
TEXT_BYTES = 57_000_000
SENT_S = 8.0  # then the sender leaves
REFUSALS = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
Make = Callable[[], pb.ModelInferRequest]


async def _ten_million_elements(scene: Scene) -> None:
    await _send(scene, [_elements] * 2)


async def _elements_within_the_limit(scene: Scene) -> None:
    """As many as are taken, from eight callers."""
    await _send(scene, [lambda: _elements(1_000_000)] * 8)


async def _progressive_jpegs(scene: Scene) -> None:
    await _send(scene, [lambda: _picture(progressive_jpeg(SIDE, SCANS))] * 2)


async def _unbroken_texts(scene: Scene) -> None:
    await _send(scene, [lambda: text_request("minilm", b"a" * TEXT_BYTES)] * 4)


async def _long_texts_of_few_tokens(scene: Scene) -> None:
    """Long words, blanks and marks that BERT takes out; each fills its message."""
    texts = (b"b" * 99 + b" " * 301, b" " * 400, "\u0301".encode() * 200, "\U0001f600".encode() * 100)
    await _send(scene, [lambda text=text: text_request("minilm", text * (TEXT_BYTES // len(text))) for text in texts])  # type: ignore[misc]


async def _many_texts_of_few_tokens(scene: Scene) -> None:
    await _send(scene, [lambda: text_request("minilm", *[b"c" * 14_000] * 4_000)] * 2)


async def _large_pictures(scene: Scene) -> None:
    await _send(scene, [lambda: _picture(_png())] * 8)


async def _pictures_that_nobody_waits_for(scene: Scene) -> None:
    """Whoever asks after they have left is answered as if they had never been there."""
    large, small = await asyncio.to_thread(_picture, _png()), _picture(photos()[0])
    async with grpc.aio.insecure_channel(scene.server.grpc) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer

        async def ask_and_leave() -> None:
            for _ in range(20):
                with suppress(grpc.aio.AioRpcError):
                    await call(large, timeout=0.2)

        await asyncio.gather(*(ask_and_leave() for _ in range(16)))
        code = await code_of(call(small, timeout=SENT_S))
        scene.must(code == "OK", f"a small picture after them: {code}")


async def _send(scene: Scene, makes: Sequence[Make]) -> None:
    """All at once; those that are not answered soon are left."""
    messages = [await asyncio.to_thread(make) for make in makes]
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(scene.server.grpc, options=options) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer

        codes = Counter(await asyncio.gather(*(code_of(call(message, timeout=SENT_S)) for message in messages)))
    scene.say(f"answered {dict(codes)}")
    scene.must(codes.keys() <= {"OK", *REFUSALS}, f"answered {dict(codes)}")


def _elements(count: int = ELEMENTS) -> pb.ModelInferRequest:
    texts = ("s", "BYTES", (1, count), b"\x01\0\0\0a" * count)
    return infer_request(LOOSE, ("n", "INT64", (1, 1), bytes(8)), texts)


def _picture(file: bytes) -> pb.ModelInferRequest:
    return infer_request("srcnn", ("image", "BYTES", (1,), pack_bytes([file])))


def _png() -> bytes:
    file = BytesIO()
    Image.new("RGB", (SIDE, SIDE), (40, 90, 160)).save(file, "PNG")
    return file.getvalue()


def progressive_jpeg(side: int, scans: int) -> bytes:
    """Its last scan, which refines every block, comes again and again."""
    file = BytesIO()
    Image.new("L", (side, side), 77).save(file, "JPEG", progressive=True)
    whole = file.getvalue()
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:end] + whole[last:end] * (scans - whole.count(b"\xff\xda")) + whole[end:]


ATTACKS = (
    Attack("2 ten million elements", _ten_million_elements),
    Attack("2 elements within the limit", _elements_within_the_limit),
    Attack("3 progressive JPEG", _progressive_jpegs),
    Attack("3 unbroken texts", _unbroken_texts),
    Attack("3 long texts of few tokens", _long_texts_of_few_tokens),
    Attack("3 many texts of few tokens", _many_texts_of_few_tokens),
    Attack("3 large pictures", _large_pictures),
    Attack("3 pictures that nobody waits for", _pictures_that_nobody_waits_for),
)
