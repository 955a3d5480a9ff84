"""The Python SDK: `Client` for threads, `AsyncClient` for an event loop."""

from penstock.client.asynchronous import AsyncClient
from penstock.client.messages import ModelEntry, ModelSignature
from penstock.client.retries import Retries
from penstock.client.synchronous import Client
from penstock.client.text_generation import Generated, TextChoice, TextDelta, TextUsage
from penstock.core.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    PenstockError,
    RateLimited,
    Refused,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)

__all__ = [
    "AsyncClient",
    "Client",
    "DeadlineExceeded",
    "Forbidden",
    "Generated",
    "InvalidRequest",
    "ModelEntry",
    "ModelSignature",
    "PenstockError",
    "RateLimited",
    "Refused",
    "Retries",
    "TextChoice",
    "TextDelta",
    "TextUsage",
    "Unauthenticated",
    "Unavailable",
    "UnknownModel",
]
