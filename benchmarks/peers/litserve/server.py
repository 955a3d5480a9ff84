"""A LitServe server of one model, with raw bytes in and out. Its argument is a JSON object; runs in LitServe's venv."""

import json
import multiprocessing
import os
import signal
import sys
from typing import Annotated, Any

import litserve
from fastapi import Body, Response
from handler import Handler


class Api(litserve.LitAPI):
    def __init__(self, handler: dict[str, Any], batch: int, wait_s: float) -> None:
        super().__init__(max_batch_size=batch, batch_timeout=wait_s)
        self._arguments = handler

    def setup(self, device: str) -> None:
        handler = Handler(**self._arguments)
        self._run = handler.many if self.max_batch_size > 1 else handler.one

    # FastAPI hands over the body as it came; with a bare Request, LitServe would read it as JSON.
    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> bytes:
        return request

    def predict(self, x: Any) -> Any:
        return self._run(x)

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="application/octet-stream")


def stop(*_: object) -> None:
    """End the processes that LitServe started: its own end on a signal fails with the fast queue and leaves them."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(3)
        child.kill()
    os._exit(0)


def main() -> None:
    given = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, stop)
    api = Api(given["handler"], given["batch"], given["wait_s"])
    server = litserve.LitServer(
        api,
        accelerator="cpu",
        devices=1,
        workers_per_device=given["workers"],
        fast_queue=given["fast_queue"],
        timeout=False,
    )
    server.run(
        host="127.0.0.1",
        port=given["port"],
        num_api_servers=given["api_servers"],
        api_server_worker_type="process",
        log_level="warning",
        generate_client_file=False,
    )


if __name__ == "__main__":
    main()
