"""A BentoML service of one model, with raw bytes in and out, set by BENTO_SETTING (JSON). Runs in BentoML's venv."""

import json
import os
from pathlib import Path
from typing import Any

import bentoml
from handler import Handler
from starlette.requests import Request
from starlette.responses import Response

GIVEN = json.loads(os.environ["BENTO_SETTING"])
READY = Path(GIVEN["ready"])  # a folder, with a file for each worker that has its model


# BentoML's own descriptors make the JSON schema of the input for each request, and support no bytes in batches.
class RawInput(bentoml.IODescriptor):
    __root_input__ = True

    @classmethod
    async def from_http_request(cls, request: Request, serde: Any) -> Any:
        return [await request.body()]


class RawOutput(bentoml.IODescriptor):
    @classmethod
    async def to_http_response(cls, obj: list[bytes], serde: Any) -> Response:
        return Response(obj[0], media_type="application/octet-stream")


@bentoml.service(
    workers=GIVEN["workers"],
    threads=1,
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    tracing={"excluded_urls": ".*"},
)
class Model:
    def __init__(self) -> None:
        self._handler = Handler(**GIVEN["handler"])
        (READY / str(os.getpid())).touch()

    def __is_ready__(self) -> bool:
        return len(list(READY.iterdir())) >= GIVEN["workers"]

    @bentoml.api(
        route="/predict",
        input_spec=RawInput,
        output_spec=RawOutput,
        batchable=GIVEN["batch"] > 1,
        max_batch_size=max(2, GIVEN["batch"]),  # BentoML wants two at least, also where nothing is batched
    )
    def predict(self, bodies: list[bytes], /) -> list[bytes]:
        return self._handler.many(bodies)
