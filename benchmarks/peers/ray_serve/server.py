"""A Ray Serve application of one model: raw bytes in and out. Its argument is a JSON object; runs in Ray's venv."""

import asyncio
import json
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import leftovers
import ray
from google.protobuf.wrappers_pb2 import BytesValue
from handler import Handler
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


def application(given: dict[str, Any]) -> serve.Application:
    """Return the application; the class is defined here because its decorator needs the batch size."""

    def ready_status() -> int:
        return 200 if os.path.exists(given["ready"]) else 503  # made when all replicas are there

    # Serve admits what comes: what is too much is for the load to show.
    deployment = serve.deployment(
        num_replicas=given["replicas"], max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1}
    )

    class Model:
        def __init__(self) -> None:
            self._handler = Handler(**given["handler"])
            self._thread = ThreadPoolExecutor(1)  # the engine takes one call at a time

        async def __call__(self, request: Request) -> Response:
            if request.method == "GET":
                return Response(status_code=ready_status())
            return Response(await self._predict(await request.body()), media_type="application/octet-stream")

        async def Predict(self, message: BytesValue) -> BytesValue:  # noqa: N802 - gRPC's name
            return BytesValue(value=await self._predict(message.value))

        async def _predict(self, body: bytes) -> bytes:
            if given["batch"] > 1:
                return await self._batch(body)
            if given["inline"]:
                return self._handler.one(body)
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._handler.one, body)

        @serve.batch(max_batch_size=given["batch"], batch_wait_timeout_s=given["wait_s"])
        async def _batch(self, bodies: list[bytes]) -> list[bytes]:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._handler.many, bodies)

    return deployment(Model).bind()


def run(given: dict[str, Any]) -> None:
    # "local": never another Ray of this machine. The object store is not used on the way of a request.
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        _temp_dir=given["scratch"],
    )
    signal.signal(signal.SIGTERM, leave)  # Ray sets its own
    logs = {"enable_access_log": False, "log_level": "WARNING"}
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": given["http_port"], "keep_alive_timeout_s": 600},
        grpc_options={"port": given["grpc_port"], "grpc_servicer_functions": ["bytes_service.add_to_server"]},
        logging_config=logs,
    )
    serve.run(application(given), logging_config=logs)
    Path(given["ready"]).touch()
    while True:
        signal.pause()


def leave(*_: object) -> None:
    sys.exit(0)


def main() -> None:
    given = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, leave)
    try:
        run(given)
    finally:
        ray.shutdown()
        leftovers.end(given["scratch"])  # HAProxy stays, else
        shutil.rmtree(given["scratch"], ignore_errors=True)


if __name__ == "__main__":
    main()
