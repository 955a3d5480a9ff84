"""Callers that send requests over gRPC streams and WebSockets until the server has ended."""

import asyncio
import json
from collections import Counter

import grpc
import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from benchmarks.server import ServerProcess
from penstock.models.samples.noop import NOOP
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.calls import make_infer_request

NUMBERS = 256
ANSWER_S = 30.0
REFUSED = "refused: the server leaves"  # before anything ran, so the client asks another server
CLOSED = "closed by the server when nothing was asked"
LEAVING = "shutting down"
SOCKET_UNACCEPTED = "socket: not accepted"  # reset by the kernel as the ports close
GOING_AWAY = 1001


async def stream_until_gone(server: ServerProcess) -> Counter[str]:
    """Send one request after another over gRPC streams."""
    said: Counter[str] = Counter()
    options = [("grpc.use_local_subchannel_pool", 1)]
    message = make_infer_request(NOOP, ("x", "FP32", (1, NUMBERS), np.zeros(NUMBERS, np.float32).tobytes()))
    async with grpc.aio.insecure_channel(server.grpc, options=options) as channel:
        while True:
            was_refused = said[REFUSED] > 0
            call = GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=10 * ANSWER_S)
            while True:
                try:
                    await call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream has ended
                    if _is_gone(await call.details() or ""):
                        return said
                    said[CLOSED] += 1
                    break
                try:
                    answer = await asyncio.wait_for(call.read(), ANSWER_S)
                except grpc.aio.AioRpcError as error:
                    if _is_gone(error.details() or ""):
                        return said
                    # A caller that asks again after a refusal may find its connection closed.
                    is_refusal = was_refused and error.code() is grpc.StatusCode.UNAVAILABLE
                    outcome = f"stream: {error.code().name}: {error.details()}"
                    said[REFUSED if is_refusal else _judge_error(outcome)] += 1
                    break
                if answer is grpc.aio.EOF:
                    said["stream: ended without an answer"] += 1
                    break
                said[_judge_error(answer.error_message)] += 1
                if answer.error_message:  # as clients do, who then ask another server
                    call.cancel()
                    await asyncio.sleep(0.05)
                    break
        return said


async def use_sockets_until_gone(server: ServerProcess) -> Counter[str]:
    """Send one request after another over WebSockets."""
    said: Counter[str] = Counter()
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, NUMBERS], "data": [0.0] * NUMBERS}
    message = json.dumps({"id": "1", "inputs": [tensor]})
    url = f"ws://127.0.0.1:{server.http_port}/v2/models/{NOOP}/stream"
    while True:
        try:
            async with connect(url, compression=None) as opened:
                while True:
                    await opened.send(message)
                    answer = json.loads(await asyncio.wait_for(opened.recv(), ANSWER_S))
                    said[_judge_error(answer.get("error", ""))] += 1
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd is not None else 0
            said[CLOSED if code == GOING_AWAY else f"socket: closed with {code}"] += 1
        except InvalidStatus as refused:
            said[REFUSED if refused.response.status_code == 503 else f"socket: {refused.response.status_code}"] += 1
            await asyncio.sleep(0.05)
        except ConnectionRefusedError:
            return said
        except (OSError, EOFError):
            said[SOCKET_UNACCEPTED] += 1


def _judge_error(error: str) -> str:
    return REFUSED if LEAVING in error else error or "OK"


def _is_gone(details: str) -> bool:
    return "onnection refused" in details or "failed to connect" in details
