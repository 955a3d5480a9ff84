"""Error messages for clients have no paths, source code or secrets, in every protocol."""

from typing import Any

import httpx
import pytest

from penstock.core.blocks import BlockState, BlockView
from penstock.core.errors import ConfigError, EngineFailed, ModelNotReady, PenstockError
from penstock.gateway.oip.model_config import make_index
from penstock.gateway.websocket.websocket_codec import encode_error
from tests.unit.conftest import Served

BEHIND = """
Traceback (most recent call last):
  File "/srv/penstock/models/m/1/model.py", line 3, in infer
    connect(key="sk-secret")
"""
MESSAGES = [
    "the model failed: ValueError: no such row" + BEHIND,
    "the model's process ended while it ran this request: exit code 1\nsk-secret",
    "/srv/penstock/models/m/model.yaml:3: unknown key 'x'",
    "ONNX Runtime: Load model from /srv/penstock/models/m/1/model.onnx failed",
    "FileNotFoundError: [Errno 2] No such file or directory: '/srv/penstock/secret/key.pem'",
    "cannot connect to redis://admin:sk-secret@cache:6379/0",
]
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/v2/models/echo/infer", {"inputs": [TENSOR]}),
    ("POST", "/v1/infer", {"model": "echo", "inputs": {"x": [[1, 2]]}}),
    ("GET", "/v1/status", None),
    ("POST", "/v2/repository/index", None),
    ("GET", "/v2/models/slow", None),
    ("POST", "/v2/models/slow/infer", {"inputs": [TENSOR]}),
]


def check(told: str) -> None:
    for secret in ("Traceback", "/srv", "sk-secret", "line 3", "connect(key"):
        assert secret not in told


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_http_answers_hide_internal_details(
    client: httpx.AsyncClient, served: Served, message: str, method: str, path: str, body: Any
) -> None:
    served.serving.error = EngineFailed(message)
    served.resolver.set_views([*served.views[:-1], _failed(message)])
    answer = await client.request(method, path, json=body)
    check(answer.text)
    assert answer.status_code in (200, 500, 503), answer.text


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("kind", [EngineFailed, ConfigError, ModelNotReady])
def test_websocket_errors_hide_internal_details(message: str, kind: type[PenstockError]) -> None:
    check(str(encode_error(kind(message), "id")))


@pytest.mark.parametrize("message", MESSAGES)
def test_reasons_in_the_index_hide_internal_details(message: str) -> None:
    check(str(make_index([_failed(message)], only_ready=False)))


def _failed(message: str) -> BlockView:
    return BlockView("blk-slow-1", "slow", "1", BlockState.FAILED, message)
