"""The code that a TorchServe worker runs: takes the bytes of a batch of requests and returns those of the answers."""

import logging
import os
from pathlib import Path
from typing import Any

import handler  # the module, not its class: TorchServe wants one class in this file


class Service:
    def initialize(self, context: Any) -> None:
        # The worker prints a line and a metric for every batch, which the frontend reads; nobody wants them here.
        logging.getLogger().setLevel(logging.WARNING)
        values = context.model_yaml_config["handler"]
        self._workers, self._loaded = values.pop("workers"), Path(values.pop("loaded"))
        self._handler = handler.Handler(**values)
        (self._loaded / str(os.getpid())).touch()

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        bodies = [bytes(row.get("body") or row.get("data") or b"") for row in rows]  # REST's and gRPC's name for it
        if all(bodies):
            return self._handler.many(bodies)
        return [self._handler.one(body) if body else self._report(context, index) for index, body in enumerate(bodies)]

    def _report(self, context: Any, index: int) -> bytes:
        """Answer a request without data, which checks that every worker is ready.

        TorchServe's /ping does not wait for that.
        """
        is_ready = len(list(self._loaded.iterdir())) >= self._workers
        context.set_response_status(200 if is_ready else 503, "", index)
        return b""
