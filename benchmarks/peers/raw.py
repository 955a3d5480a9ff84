"""Items and answers as raw bytes, for the peers whose handlers get the body of a request as it came."""

import socket
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import NOOP, SRCNN, Assets, Item

SHARED = Path(__file__).parent / "shared"
ANSWER_SHAPES = {NOOP: (1, 256)}  # else as many as there are


def body_of(item: Item) -> bytes:
    if isinstance(item, str):
        return item.encode()
    return item if isinstance(item, bytes) else np.ascontiguousarray(item, np.float32).tobytes()


def http_request(path: str, item: Item) -> bytes:
    body = body_of(item)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def answer_of(workload: str, body: bytes) -> Any:
    if workload == SRCNN:
        return body
    return np.frombuffer(body, np.float32).reshape(ANSWER_SHAPES.get(workload, -1))


def handler_of(workload: str, assets: Assets, values: Any) -> dict[str, Any]:
    """The arguments of shared/handler.py's Handler, for a setting's values."""
    given = {key: values[key] for key in ("engine", "threads", "alike") if key in values}
    return {"workload": workload, "folder": str(getattr(assets, workload).absolute()), **given}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
