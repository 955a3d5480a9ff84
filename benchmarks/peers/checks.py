"""Checks a server's answers, over its real protocol, before measuring: they must match the model's answers."""

import http.client
import io
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import numpy as np
from PIL import Image

from benchmarks.peers.failures import WrongAnswer
from benchmarks.peers.peer import BEST, MINILM, NOOP, SAME, SRCNN, Assets, Item, Peer
from penstock.experiments.load.drivers import STREAM

COSINE = {SAME: 0.99999, BEST: 0.9999}
PIXEL = {SAME: 3, BEST: 6}  # of 255
AT_ONCE = 16
TIMEOUT_S = 60.0
_MESSAGE_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class References:
    """The right answers: those of ONNX Runtime in FP32, one item at a time, in this process."""

    def __init__(self, assets: Assets) -> None:
        self._assets = assets
        self._found: dict[str, list[Any]] = {}

    def of(self, workload: str, items: Sequence[Item]) -> list[Any]:
        """Return the right answers for a workload. `list_items` must not change between calls."""
        if workload not in self._found:
            self._found[workload] = self._compute(workload, items)
        return self._found[workload]

    def _compute(self, workload: str, items: Sequence[Item]) -> list[Any]:
        from handler import load  # as the peers' own processes import it

        model = load(workload, str(self._assets.folder(workload)))
        if workload == MINILM:
            return [model.embed([text])[0] for text in items]
        return [model.upscale(photo) for photo in items] if workload == SRCNN else list(items)


def check(
    peer: Peer, workload: str, comparison: str, call: tuple[str, str], items: Sequence[Item], right: Sequence[Any]
) -> None:
    """Check answers one by one, then many at once, because batches must not mix answers up.

    `call` is a protocol and its target.
    """
    protocol, target = call
    requests = [peer.request(workload, protocol, item) for item in items]
    with _make_caller(protocol, target, peer.grpc_method) as send:
        alone = [send(request) for request in requests]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            count = -(-AT_ONCE // len(requests))
            together = list(pool.map(send, requests * count))
    for bodies, how in ((alone, "alone"), (together, f"{AT_ONCE} at once")):
        for number, body in enumerate(bodies):
            answer = peer.answer(workload, protocol, body)
            fault = find_fault(workload, comparison, answer, right[number % len(items)])
            if fault:
                raise WrongAnswer(f"wrong answer over {protocol} ({how}, item {number % len(items)}): {fault}")


def find_fault(workload: str, comparison: str, answer: Any, right: Any) -> str:
    """Describe how the answer deviates from the right answer; empty if it is close enough."""
    if workload == NOOP:
        same = np.asarray(answer).dtype == np.float32 and np.asarray(answer).tobytes() == right.tobytes()
        return "" if same else "not the tensor that was sent"
    if workload == SRCNN:
        return _find_pixel_fault(answer, right, PIXEL[comparison])
    vector = np.asarray(answer)
    if vector.shape != right.shape:
        return f"shape {vector.shape}, not {right.shape}"
    cosine = float(vector @ right / (np.linalg.norm(vector) * np.linalg.norm(right)))
    return "" if cosine >= COSINE[comparison] else f"cosine {cosine:.6f} to the reference, below {COSINE[comparison]}"


def _find_pixel_fault(answer: bytes, right: bytes, max_difference: int) -> str:
    found, wanted = (np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), np.int16) for png in (answer, right))
    if found.shape != wanted.shape:
        return f"an image of shape {found.shape}, not {wanted.shape}"
    furthest = int(np.abs(found - wanted).max())
    return (
        ""
        if furthest <= max_difference
        else f"a pixel is {furthest}/255 from the reference, more than {max_difference}/255"
    )


@contextmanager
def _make_caller(protocol: str, target: str, grpc_method: str) -> Iterator[Callable[[bytes], bytes]]:
    """Return a function that sends the bytes that the load generator sends, and returns the body of the answer."""
    if protocol == "rest":
        yield partial(_call_http, target)
        return
    with grpc.insecure_channel(target, options=_MESSAGE_OPTIONS) as channel:
        if protocol == "grpc":
            unary = channel.unary_unary(grpc_method)
            yield lambda message: bytes(unary(message, timeout=TIMEOUT_S))
        else:
            stream = channel.stream_stream(STREAM)
            yield lambda message: bytes(next(stream(iter([message]), timeout=TIMEOUT_S)))


def _call_http(target: str, message: bytes) -> bytes:
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(message)
        answer = http.client.HTTPResponse(connection, method="POST")
        answer.begin()
        body = answer.read()
    if answer.status != 200:
        raise WrongAnswer(f"HTTP status {answer.status}: {body[:200].decode(errors='replace')}")
    return body
