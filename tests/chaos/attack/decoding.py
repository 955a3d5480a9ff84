"""Messages within the size limit that are expensive to decode: the server must refuse them or decode in a thread."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

import grpc
import httpx
import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from penstock.gateway.gateway_grpc import SERVICE
from penstock.pb.inference import grpc_service_pb2 as pb
from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.calls import get_status_name
from tests.chaos.repository import ANY_SIZE_MODEL

SIZE = 50_000_000
AT_ONCE = 3
WAIT_S = 90.0
FORM = "multipart/form-data; boundary=b"
OIP = f"/v2/models/{ANY_SIZE_MODEL}/infer"
Make = Callable[[], bytes]


def _repeat_piece(piece: bytes, between: bytes = b",", size: int = SIZE) -> bytes:
    return between.join([piece] * (size // (len(piece) + len(between))))


def _make_tensor(data: bytes, count: int, name: str = "n") -> bytes:
    shapes = {"n": 1, "s": 1, name: count}
    values = {"n": b"1", "s": b'"a"', name: data}
    tensor = b'{"name":"%s","datatype":"%s","shape":[1,%d],"data":[%s]}'
    kinds = {"n": b"INT64", "s": b"BYTES"}
    inputs = [tensor % (each.encode(), kinds[each], shapes[each], values[each]) for each in kinds]
    return b'{"inputs":[' + b",".join(inputs) + b"]}"


def _make_list(piece: bytes, name: str = "n", size: int = SIZE) -> bytes:
    return _make_tensor(_repeat_piece(piece, size=size), size // (len(piece) + 1), name)


def _make_numbered_pieces(count: int, before: bytes, after: bytes) -> bytes:
    """Return `count` pieces, each with its number in seven digits between `before` and `after`."""
    made = np.empty((count, len(before) + 7 + len(after)), np.uint8)
    made[:, : len(before)] = np.frombuffer(before, np.uint8)
    made[:, len(before) + 7 :] = np.frombuffer(after, np.uint8)
    for digit in range(7):
        made[:, len(before) + digit] = np.arange(count) // 10 ** (6 - digit) % 10 + ord("0")
    return made.tobytes()


def _make_keys(count: int) -> bytes:
    return _make_numbered_pieces(count, b'"', b'":1,') + b'"last":1'


# Shapes of JSON for the Open Inference Protocol, over REST and WebSockets.
OIP_SHAPES: Mapping[str, Make] = {
    "small numbers": partial(_make_list, b"0"),
    "long numbers": partial(_make_list, b"1234567890123456"),
    "as many numbers as are taken": partial(_make_list, b"1234567890", size=45_000_000),
    "texts": partial(_make_list, b'"a"', "s"),
    "empty lists": partial(_make_list, b"[]"),
    "empty objects": partial(_make_list, b"{}"),
    "a million inputs": lambda: b'{"inputs":[' + _repeat_piece(b"{}", size=3_000_000) + b"]}",
    "inputs without elements": lambda: (
        b'{"inputs":[' + _repeat_piece(b'{"name":"n","datatype":"FP32","shape":[0],"data":[]}') + b"]}"
    ),
    "many parameters": lambda: b'{"inputs":[],"parameters":{' + _make_keys(4_000_000) + b"}}",
    "many outputs": lambda: b'{"inputs":[],"outputs":[' + _repeat_piece(b'{"name":"a"}') + b"]}",
    "one huge text": lambda: _make_tensor(b'"' + b"a" * SIZE + '\N{GRINNING FACE}"'.encode(), 1, "s"),
    "one huge number": lambda: _make_tensor(b"1" * SIZE, 1),
    "one huge parameter": lambda: b'{"inputs":[],"parameters":{"a":"' + b"a" * SIZE + b'"}}',
    "escapes": lambda: _make_tensor(b'"' + b'\\"' * (SIZE // 2) + b'"', 1, "s"),
    "deep lists": lambda: b"[" * SIZE,
    "deep objects": lambda: b'{"a":' * (SIZE // 5),
    "blanks": lambda: b" " * SIZE + b"{}",
}
V1_SHAPES: Mapping[str, tuple[str, Make]] = {
    "embeddings of many": ("embeddings", lambda: b'{"model":"minilm","input":[' + _repeat_piece(b'"a"') + b"]}"),
    "embeddings of nothing": ("embeddings", lambda: b'{"model":"minilm","input":[' + _repeat_piece(b"null") + b"]}"),
    "embeddings of a huge text": (
        "embeddings",
        lambda: b'{"model":"minilm","input":"' + b"a " * (SIZE // 2) + b'"}',
    ),
    "documents": ("rerank", lambda: b'{"query":"a","documents":[' + _repeat_piece(b'"a"') + b"]}"),
    "documents with keys": ("rerank", lambda: b'{"query":"a","documents":[' + _repeat_piece(b'{"text":"a"}') + b"]}"),
    "plain values": (
        "infer",
        lambda: b'{"model":"%s","inputs":{"n":[' % ANY_SIZE_MODEL.encode() + _repeat_piece(b"0") + b"]}}",
    ),
    "plain inputs": (
        "infer",
        lambda: b'{"model":"%s","inputs":{' % ANY_SIZE_MODEL.encode() + _make_keys(4_000_000) + b"}}",
    ),
    "plain outputs": (
        "infer",
        lambda: b'{"model":"%s","inputs":{},"outputs":[' % ANY_SIZE_MODEL.encode() + _repeat_piece(b"1") + b"]}",
    ),
    "plain parameters": (
        "infer",
        lambda: b'{"model":"%s","inputs":{},"parameters":{' % ANY_SIZE_MODEL.encode() + _make_keys(4_000_000) + b"}}",
    ),
}


def _encode_field(number: int, value: bytes) -> bytes:
    return _encode_tag(number, 2) + _encode_varint(len(value)) + value


def _encode_tag(number: int, kind: int) -> bytes:
    return _encode_varint(number << 3 | kind)


def _encode_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes(found) + bytes([value])


def _encode_contents(number: int, value: bytes, datatype: bytes = b"INT64") -> bytes:
    tensor = (
        _encode_field(1, b"n")
        + _encode_field(2, datatype)
        + _encode_field(3, b"\1\1")
        + _encode_field(5, _encode_field(number, value))
    )
    return _encode_field(1, ANY_SIZE_MODEL.encode()) + _encode_field(5, tensor)


def _encode_parameters(field: int) -> bytes:
    entry = _encode_field(field, _encode_field(1, b"0000000") + _encode_field(2, b"\x08\x01"))
    return _encode_field(1, ANY_SIZE_MODEL.encode()) + _make_numbered_pieces(4_000_000, *entry.split(b"0000000"))


def _make_texts() -> bytes:
    tensor = (
        _encode_field(1, b"n") + _encode_field(2, b"BYTES") + _encode_field(5, _encode_field(8, b"a") * (SIZE // 3))
    )
    return _encode_field(1, ANY_SIZE_MODEL.encode()) + _encode_field(5, tensor)


# Messages in protobuf's encoding, and the methods that they are sent to.
GRPC_SHAPES: Mapping[str, tuple[str, Make]] = {
    "four million parameters": ("ModelInfer", lambda: _encode_parameters(4)),
    "a million empty inputs": ("ModelInfer", lambda: b"\x2a\x00" * 1_000_000),
    "millions of empty outputs": ("ModelInfer", lambda: b"\x32\x00" * (SIZE // 2)),
    "millions of empty tensors": ("ModelInfer", lambda: b"\x3a\x00" * (SIZE // 2)),
    "millions of names": ("ModelInfer", lambda: b"\x0a\x00" * (SIZE // 2)),
    "millions of unknown fields": ("ModelInfer", lambda: b"\x78\x01" * (SIZE // 2)),
    "unknown fields in a parameter": (
        "ModelInfer",
        lambda: _encode_field(4, _encode_field(2, b"\x78\x01" * (SIZE // 2))),
    ),
    "unknown fields in contents": ("ModelInfer", lambda: _encode_field(5, _encode_field(5, b"\x78\x01" * (SIZE // 2)))),
    "groups": ("ModelInfer", lambda: b"\x7b" * SIZE),
    "a huge id": ("ModelInfer", lambda: _encode_field(1, ANY_SIZE_MODEL.encode()) + _encode_field(3, b"a" * SIZE)),
    "typed contents of small numbers": ("ModelInfer", lambda: _encode_contents(3, b"\1" * SIZE)),
    "typed contents of flags": ("ModelInfer", lambda: _encode_contents(1, b"\1" * SIZE, b"BOOL")),
    "typed contents of floats": ("ModelInfer", lambda: _encode_contents(6, b"\1" * SIZE, b"FP32")),
    "typed contents of as many floats as are taken": (
        "ModelInfer",
        lambda: _encode_contents(6, b"\1" * 4 * 4_000_000, b"FP32"),
    ),
    "typed contents of texts": ("ModelInfer", _make_texts),
    "a load with parameters": ("RepositoryModelLoad", lambda: _encode_parameters(3)),
    "readiness of a huge name": ("ModelReady", lambda: _encode_field(1, b"a" * SIZE)),
    "readiness with unknown fields": ("ServerReady", lambda: b"\x78\x01" * (SIZE // 2)),
    "shared memory of a huge name": ("SystemSharedMemoryStatus", lambda: _encode_field(1, b"a" * SIZE)),
}
FORM_SHAPES: Mapping[str, Make] = {
    "lines": lambda: b"--b\r\n" + b"\r\n" * (SIZE // 2),
    "almost boundaries": lambda: (
        b'--b\r\ncontent-disposition: form-data; name="n"\r\n\r\n' + b"\r\n-" * (SIZE // 3) + b"\r\n--b--\r\n"
    ),
    "parts": lambda: b'--b\r\ncontent-disposition: form-data; name="n"\r\n\r\n\r\n' * (SIZE // 60) + b"--b--\r\n",
    "a value": lambda: (
        b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n%s\r\n' % ANY_SIZE_MODEL.encode()
        + b'--b\r\ncontent-disposition: form-data; name="n"\r\n\r\n['
        + _repeat_piece(b"0")
        + b"]\r\n--b--\r\n"
    ),
}


async def _make_in_process(name: str) -> bytes:
    """Make the message `name` in another process, so that this process stays small and responsive."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", __spec__.name, name, stdout=pipe)
    return (await process.communicate())[0]


async def _ask_concurrently(ask: Callable[[], Awaitable[str]]) -> Counter[str]:
    return Counter(await asyncio.gather(*(ask() for _ in range(AT_ONCE))))


def _judge(scene: Scene, what: str, answers: Counter[str], bad: Iterable[str]) -> None:
    scene.say(f"{what}: {dict(answers)}")
    scene.must(not any(code in answers for code in bad), f"{what}: answered {dict(answers)}")


async def _post_all(scene: Scene, path: str, names: Iterable[str], content_type: str = "application/json") -> None:
    base = f"http://{scene.server.http}"
    async with httpx.AsyncClient(base_url=base, timeout=WAIT_S, headers={"content-type": content_type}) as client:
        for name in names:
            body = await _make_in_process(name)

            async def ask(body: bytes = body) -> str:
                try:
                    return str((await client.post(path, content=body)).status_code)
                except httpx.TransportError as error:  # the server refused the message before reading all of it
                    return type(error).__name__

            _judge(scene, name, await _ask_concurrently(ask), ("500", "503", "504", "ReadTimeout"))


async def _attack_v1(scene: Scene) -> None:
    for name, (path, _) in V1_SHAPES.items():
        await _post_all(scene, f"/v1/{path}", [name])


async def _attack_control(scene: Scene) -> None:
    for path in ("/v2/repository/index", f"/v2/repository/models/{ANY_SIZE_MODEL}/load", "/v1/models/loose/routing"):
        await _post_all(scene, path, ("many parameters", "blanks"))


async def _attack_websocket(scene: Scene) -> None:
    url = f"ws://{scene.server.http}/v2/models/{ANY_SIZE_MODEL}/stream"
    for name in WS:
        body = await _make_in_process(name)

        async def ask(text: str = body.decode()) -> str:
            try:
                async with connect(url, max_size=None, compression=None, open_timeout=WAIT_S) as connection:
                    await connection.send(text)
                    return str(json.loads(await connection.recv()).get("code", "answered"))
            except ConnectionClosed as error:
                return f"closed with {error.rcvd.code if error.rcvd else 'nothing'}"

        _judge(scene, name, await _ask_concurrently(ask), ("internal", "closed with nothing"))


async def _attack_grpc(scene: Scene, names: tuple[str, ...]) -> None:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(scene.server.grpc, options=options) as channel:
        for name in names:
            body, call = await _make_in_process(name), channel.unary_unary(f"/{SERVICE}/{GRPC_SHAPES[name][0]}")

            async def ask(body: bytes = body, call: grpc.aio.UnaryUnaryMultiCallable = call) -> str:
                return await get_status_name(call(body, timeout=WAIT_S))

            _judge(
                scene, name, await _ask_concurrently(ask), ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED")
            )


async def _attack_other_grpc(scene: Scene) -> None:
    """Send streams, and messages to services that are not Penstock's own."""
    typed = await _make_in_process("typed contents of texts")
    fields = await _make_in_process("readiness with unknown fields")
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(scene.server.grpc, options=options) as channel:
        stream = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString
        )
        said = [answer.error_message async for answer in stream(iter([typed, fields]), timeout=WAIT_S)]
        scene.must(len(said) == 2 and all(said), f"a stream answers {said}")
        health: grpc.aio.UnaryUnaryMultiCallable = channel.unary_unary("/grpc.health.v1.Health/Check")
        for body in (fields, b"\xff\xff"):
            code = await get_status_name(health(body, timeout=WAIT_S))
            scene.must(code in ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"), f"health answers {code}")


async def _request_large_answers(scene: Scene) -> None:
    """Send tensors as bytes that the answer returns as JSON."""
    for count in (4_000_000, 7_000_000):
        data = np.arange(count).tobytes()
        numbers = {"name": "n", "datatype": "INT64", "shape": [1, count], "parameters": {"binary_data_size": len(data)}}
        texts = {"name": "s", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}
        given = json.dumps({"inputs": [numbers, texts]}).encode()
        headers = {"inference-header-content-length": str(len(given)), "accept-encoding": "gzip"}
        base = f"http://{scene.server.http}"
        async with httpx.AsyncClient(base_url=base, timeout=WAIT_S, headers=headers) as client:

            async def ask(client: httpx.AsyncClient = client, body: bytes = given + data) -> str:
                async with client.stream("POST", OIP, content=body) as answer:
                    async for _ in answer.aiter_raw():
                        pass
                    return str(answer.status_code)

            _judge(scene, f"{count} elements", await _ask_concurrently(ask), ("500", "503", "504"))


WS = ("small numbers", "many parameters", "empty lists", "one huge text", "a million inputs")
NUMBERS = ("small numbers", "long numbers", "as many numbers as are taken", "texts")
LISTS = ("empty lists", "empty objects", "deep lists", "deep objects", "blanks")
MANY = ("a million inputs", "inputs without elements", "many parameters", "many outputs")
ONE = ("one huge text", "one huge number", "one huge parameter", "escapes")
PARAMETERS = tuple(name for name in GRPC_SHAPES if "typed" not in name)
TYPED = tuple(name for name in GRPC_SHAPES if "typed" in name)
ATTACKS = (
    Attack("2 JSON of fifty megabytes: numbers", partial(_post_all, path=OIP, names=NUMBERS)),
    Attack("2 JSON of fifty megabytes: lists", partial(_post_all, path=OIP, names=LISTS)),
    Attack("2 JSON of fifty megabytes: many inputs and parameters", partial(_post_all, path=OIP, names=MANY)),
    Attack("2 JSON of fifty megabytes: one of everything", partial(_post_all, path=OIP, names=ONE)),
    Attack("2 JSON of fifty megabytes under /v1", _attack_v1),
    Attack("2 forms of fifty megabytes", partial(_post_all, path="/v1/infer", names=FORM_SHAPES, content_type=FORM)),
    Attack("2 control messages of fifty megabytes", _attack_control),
    Attack("2 WebSocket messages of fifty megabytes", _attack_websocket),
    Attack("2 four million parameters, a million empty inputs", partial(_attack_grpc, names=PARAMETERS)),
    Attack("2 typed contents of fifty megabytes", partial(_attack_grpc, names=TYPED)),
    Attack("2 streams, health and reflection", _attack_other_grpc),
    Attack("2 large answers", _request_large_answers),
)

if __name__ == "__main__":
    every = {**OIP_SHAPES, **FORM_SHAPES, **{name: make for name, (_, make) in {**V1_SHAPES, **GRPC_SHAPES}.items()}}
    sys.stdout.buffer.write(every[sys.argv[1]]())
