"""The Python SDK: `Client` for threads, `AsyncClient` for an event loop."""

from penstock.client.asynchronous import AsyncClient
from penstock.client.messages import ModelEntry, ModelSignature
from penstock.client.retries import Retries
from penstock.client.synchronous import Client

__all__ = ["AsyncClient", "Client", "ModelEntry", "ModelSignature", "Retries"]
