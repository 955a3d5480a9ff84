"""Small or valid requests that are expensive to process: many elements, many scans, long words, large pictures."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO

import grpc
from PIL import Image

from penstock.core.tensors import pack_bytes
from penstock.models.samples.photos import photos
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.calls import get_status_name, make_infer_request, make_text_request
from tests.chaos.repository import ANY_SIZE_MODEL

ELEMENTS = 10_000_000
SIDE = 5_000  # 25 megapixels, the limit of upscale
SCANS = 1_200
TEXT_BYTES = 57_000_000
SENT_S = 8.0  # then the sender disconnects
REFUSALS = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
# Long words, blanks, and marks that BERT removes.
FEW_TOKENS = (b"b" * 99 + b" " * 301, b" " * 400, "\u0301".encode() * 200, "\U0001f600".encode() * 100)
Make = Callable[[], pb.ModelInferRequest]


async def _leave_after_sending_pictures(scene: Scene) -> None:
    """Send requests and disconnect. Later callers must not wait for the abandoned requests."""
    large, small = await asyncio.to_thread(_make_picture, _make_png()), _make_picture(photos()[0])
    async with grpc.aio.insecure_channel(scene.server.grpc) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer

        async def ask_and_leave() -> None:
            for _ in range(20):
                with suppress(grpc.aio.AioRpcError):
                    await call(large, timeout=0.2)

        await asyncio.gather(*(ask_and_leave() for _ in range(16)))
        code = await get_status_name(call(small, timeout=SENT_S))
        scene.must(code == "OK", f"a small picture after them: {code}")


async def _send(scene: Scene, makes: Sequence[Make]) -> None:
    """Send all requests concurrently, and abandon those that are not answered soon."""
    messages = [await asyncio.to_thread(make) for make in makes]
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(scene.server.grpc, options=options) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer

        codes = Counter(await asyncio.gather(*(get_status_name(call(message, timeout=SENT_S)) for message in messages)))
    scene.say(f"answered {dict(codes)}")
    scene.must(codes.keys() <= {"OK", *REFUSALS}, f"answered {dict(codes)}")


def _make_elements(count: int = ELEMENTS) -> pb.ModelInferRequest:
    texts = ("s", "BYTES", (1, count), b"\x01\0\0\0a" * count)
    return make_infer_request(ANY_SIZE_MODEL, ("n", "INT64", (1, 1), bytes(8)), texts)


def _make_texts(piece: bytes, size: int, count: int = 1) -> pb.ModelInferRequest:
    return make_text_request("minilm", *[piece * (size // len(piece))] * count)


def _make_picture(file: bytes) -> pb.ModelInferRequest:
    return make_infer_request("srcnn", ("image", "BYTES", (1,), pack_bytes([file])))


def _make_png() -> bytes:
    file = BytesIO()
    Image.new("RGB", (SIDE, SIDE), (40, 90, 160)).save(file, "PNG")
    return file.getvalue()


def make_progressive_jpeg(side: int, scans: int) -> bytes:
    """Return a JPEG whose last scan, which refines every block, is repeated."""
    file = BytesIO()
    Image.new("L", (side, side), 77).save(file, "JPEG", progressive=True)
    whole = file.getvalue()
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:end] + whole[last:end] * (scans - whole.count(b"\xff\xda")) + whole[end:]


ATTACKS = (
    Attack("2 ten million elements", partial(_send, makes=[_make_elements] * 2)),
    Attack("2 elements within the limit", partial(_send, makes=[partial(_make_elements, 1_000_000)] * 8)),
    Attack("3 progressive JPEG", partial(_send, makes=[lambda: _make_picture(make_progressive_jpeg(SIDE, SCANS))] * 2)),
    Attack("3 unbroken texts", partial(_send, makes=[partial(_make_texts, b"a", TEXT_BYTES)] * 4)),
    Attack(
        "3 long texts of few tokens",
        partial(_send, makes=[partial(_make_texts, text, TEXT_BYTES) for text in FEW_TOKENS]),
    ),
    Attack("3 many texts of few tokens", partial(_send, makes=[partial(_make_texts, b"c", 14_000, 4_000)] * 2)),
    Attack("3 large pictures", partial(_send, makes=[lambda: _make_picture(_make_png())] * 8)),
    Attack("3 pictures whose clients have left", _leave_after_sending_pictures),
)
