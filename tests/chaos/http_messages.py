"""Makes invalid HTTP requests from the OpenAPI document, and by changing valid JSON and bytes."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from urllib.parse import quote

import numpy as np
import requests
import schemathesis
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import DrawFn
from schemathesis.generation import GenerationMode

from tests.chaos.infer_messages import DATATYPES, SIZES, TEXT, make_small_image
from tests.chaos.mutation import draw_examples, mutate
from tests.chaos.repository import ANY_SIZE_MODEL, ECHO, ECHO_FLOATS

HEADER_LENGTH = "Inference-Header-Content-Length"
BOUNDARY = "b0undary"
JSON_HEADERS = (("Content-Type", "application/json"),)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | SIZES | st.floats(allow_nan=False, allow_infinity=False) | TEXT | DATATYPES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
LENGTHS = st.sampled_from(["-1", "0", "1", "99999999", "9" * 30, "0x10", "1.5", "", "١", "7 7"]) | st.integers(
    0, 2000
).map(str)
ODD_HEADERS: Mapping[str, Sequence[str]] = {
    "Content-Type": (
        "application/json",
        "text/plain",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "image/png",
        "?",
    ),
    "Content-Encoding": ("gzip", "deflate", "br", "identity", "gzip, gzip", "?"),
    "Accept-Encoding": ("gzip;q=2", "*;q=0", ",,,", "deflate"),
    "x-request-timeout-ms": ("0", "-1", "1", "1e3", "9" * 20, "abc"),
    "x-request-id": ("a b", "i" * 300, "ok"),
    "traceparent": ("00-0-0-0", "x" * 200, "00-" + "f" * 32 + "-" + "f" * 16 + "-ff"),
    "Expect": ("100-continue", "200-ok"),
}


@dataclass(frozen=True, slots=True)
class HttpMessage:
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def encode(self) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + self.body


def list_valid_messages() -> list[HttpMessage]:
    """Return one message for each kind of request."""
    floats = np.arange(ECHO_FLOATS, dtype=np.float32)
    echo = _make_tensor("x", "FP32", (1, ECHO_FLOATS))
    loose = [_make_tensor("n", "INT64", (1, 2), [1, 2]), _make_tensor("s", "BYTES", (1, 1), ["left"])]
    text = [_make_tensor("text", "BYTES", (1,), ["a penstock"])]
    header = json.dumps({"inputs": [{**echo, "parameters": {"binary_data_size": floats.nbytes}}]}).encode()
    image = make_small_image()
    encoded = {"b64": base64.b64encode(image).decode()}
    return [
        _make_post(f"/v2/models/{ECHO}/infer", {"id": "1", "inputs": [{**echo, "data": floats.tolist()}]}),
        _make_post(f"/v2/models/{ANY_SIZE_MODEL}/versions/1/infer", {"inputs": loose, "outputs": [{"name": "n_out"}]}),
        _make_post("/v2/models/minilm/infer", {"inputs": text, "parameters": {"binary_data_output": True}}),
        HttpMessage(
            "POST", f"/v2/models/{ECHO}/infer", ((HEADER_LENGTH, str(len(header))),), header + floats.tobytes()
        ),
        HttpMessage("POST", f"/v2/models/{ECHO}/infer", ((HEADER_LENGTH, "0"),), floats.tobytes()),
        _make_post("/v1/embeddings", {"model": "minilm", "input": ["a penstock"], "encoding_format": "base64"}),
        _make_post("/v1/infer", {"model": "srcnn", "inputs": {"image": encoded}}),
        _make_post("/v1/infer", {"model": ANY_SIZE_MODEL, "inputs": loose, "parameters": {}, "outputs": []}),
        _make_post("/v2/repository/index", {"ready": True}),
        _make_form("/v1/images/upscale", [("image", image, "p.png"), ("model", b"srcnn", None)]),
        _make_form("/v1/infer", [("model", b"minilm", None), ("text", b"a penstock", None)]),
        HttpMessage("POST", "/v1/images/upscale", (("Content-Type", "image/png"),), image),
    ]


@st.composite
def draw_wrong_json(draw: DrawFn) -> HttpMessage:
    """Return a JSON request with one or two values replaced."""
    messages = [message for message in list_valid_messages() if message.headers == JSON_HEADERS]
    message = draw(st.sampled_from(messages))
    body = json.loads(message.body)
    for _ in range(draw(st.integers(1, 2))):
        _replace_one(draw, body)
    return replace(message, body=json.dumps(body).encode())


@st.composite
def draw_wrong_header(draw: DrawFn) -> HttpMessage:
    message = draw(st.sampled_from(list_valid_messages()))
    if draw(st.booleans()):
        kept = tuple(pair for pair in message.headers if pair[0] != HEADER_LENGTH)
        return replace(message, headers=(*kept, (HEADER_LENGTH, draw(LENGTHS))))
    name = draw(st.sampled_from(sorted(ODD_HEADERS)))
    return replace(message, headers=(*message.headers, (name, draw(st.sampled_from(ODD_HEADERS[name])))))


def list_openapi_messages(page: Mapping[str, Any], count: int, seed: int) -> list[HttpMessage]:
    """Return schemathesis' requests for the server's OpenAPI page, without routes that unload models or never end."""
    schema: Any = schemathesis.openapi.from_dict(dict(page))
    operations = [found.ok() for found in schema.get_all_operations()]
    left_out = ("/repository/models/", "/v1/live")
    wanted = [operation for operation in operations if not any(path in operation.path for path in left_out)]
    found: list[HttpMessage] = []
    for operation in wanted:
        mode = GenerationMode.NEGATIVE if operation.method == "post" else GenerationMode.POSITIVE
        try:
            cases = draw_examples(operation.as_strategy(generation_mode=mode), max(2, count // len(wanted)), seed)
        except Unsatisfiable:
            continue
        found += [_convert_case(case, operation.path) for case in cases]
    return found


def generate_messages(seeds: Sequence[HttpMessage], rng: Random) -> Iterator[HttpMessage]:
    bodies = [message.body for message in seeds if message.body]
    yield from seeds
    while True:
        message = rng.choice(seeds)
        kind = rng.randrange(8)
        if kind == 0:
            yield replace(message, headers=rng.choice(seeds).headers)
        elif kind == 1:
            path = mutate(message.path.encode(), rng, [b"/v2/models/echo/infer"]).decode("latin-1")
            yield replace(message, path="/" + quote(path.lstrip("/"), safe="/?=&%"))
        elif kind == 2:
            yield replace(message, body=rng.choice(bodies))
        else:
            yield replace(message, body=mutate(message.body, rng, bodies))


def _convert_case(case: Any, path: str) -> HttpMessage:
    options = case.as_transport_kwargs(base_url="http://localhost")
    wanted = ("method", "url", "json", "data", "files", "params", "headers")
    prepared = requests.Request(**{key: options[key] for key in wanted if key in options}).prepare()
    body: Any = prepared.body or b""
    encoded = body.encode("utf-8", "replace") if isinstance(body, str) else bytes(body)
    kept = tuple((name, str(value)) for name, value in prepared.headers.items() if name.lower() == "content-type")
    target = prepared.path_url
    if path.endswith("/infer") and "{model}" in path:
        target = path.replace("{model}", ECHO).replace("{version}", "1")
    return HttpMessage(str(prepared.method), target, kept, encoded)


def _replace_one(draw: DrawFn, value: Any) -> None:
    """Replace a randomly chosen, possibly nested value."""
    while isinstance(value, dict | list) and value:
        keys = sorted(value) if isinstance(value, dict) else list(range(min(len(value), 4)))
        key = draw(st.sampled_from(keys))
        if not isinstance(value[key], dict | list) or draw(st.booleans()):
            if isinstance(value, dict) and draw(st.integers(0, 4)) == 0:
                del value[key]
            else:
                value[key] = draw(JSON_VALUES)
            return
        value = value[key]


def _make_tensor(name: str, datatype: str, shape: tuple[int, ...], data: Any = None) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(shape)}
    if data is not None:
        tensor["data"] = data
    return tensor


def _make_post(path: str, body: Mapping[str, Any]) -> HttpMessage:
    return HttpMessage("POST", path, JSON_HEADERS, json.dumps(body).encode())


def _make_form(path: str, parts: Sequence[tuple[str, bytes, str | None]]) -> HttpMessage:
    body = b""
    for name, data, file in parts:
        ending = f'; filename="{file}"' if file else ""
        body += (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{ending}\r\n\r\n'.encode() + data + b"\r\n"
        )
    content_type = f"multipart/form-data; boundary={BOUNDARY}"
    return HttpMessage("POST", path, (("Content-Type", content_type),), body + f"--{BOUNDARY}--\r\n".encode())
