"""A model registry with its gRPC door, in this process, and models to put into it."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock.access.guard import open_guard
from penstock.client.registry import RegistryClient
from penstock.core.config import RegistrySettings
from penstock.core.manifest import Manifest, make_manifest
from penstock.manager.access.door import GuardedDoor
from penstock.manager.models.registry import ModelRegistry
from penstock.manager.models.service import TAKE_S, ModelRegistryService
from penstock.pb.v1 import registry_pb2_grpc
from penstock.storage.metadata.base import MetadataStore
from penstock.storage.metadata.opening import open_metadata
from penstock.storage.objects.base import ObjectStore
from penstock.storage.objects.folder import FolderObjects

SETTINGS = "task: tensor\ntags: [small]\n"


@dataclass
class RegistryBed:
    folder: Path
    registry: ModelRegistry
    store: MetadataStore
    objects: ObjectStore
    address: str

    def client(self) -> RegistryClient:
        return RegistryClient(self.address)

    def stored(self) -> set[str]:
        """Names of all that lies in the object store."""
        return {file.name for file in (self.folder / "objects").rglob("*") if file.is_file()}

    def staged(self) -> list[Path]:
        return [file for file in (self.folder / "uploads").rglob("*") if file.is_file()]


@asynccontextmanager
async def registry_bed(
    folder: Path, settings: RegistrySettings | None = None, objects: ObjectStore | None = None, take_s: float = TAKE_S
) -> AsyncIterator[RegistryBed]:
    store = await open_metadata("sqlite:///metadata.db", folder)
    objects = objects or FolderObjects(folder / "objects")
    registry = ModelRegistry(store, objects, folder / "uploads", settings or RegistrySettings())
    server = grpc.aio.server()
    door = GuardedDoor(server, open_guard())
    registry_pb2_grpc.add_ModelRegistryServicer_to_server(ModelRegistryService(registry, take_s), door)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield RegistryBed(folder, registry, store, objects, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
        await store.close()


def write_files(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    """By their SHA-256."""
    found = {}
    for name, data in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        found[hashlib.sha256(data).hexdigest()] = file
    return found


def manifest_of(files: dict[str, bytes], model: str = "m", version: str = "1") -> Manifest:
    return make_manifest(
        model,
        version,
        [
            {"path": path, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in sorted(files.items())
        ],
    )


def model_of(data: bytes = b"weights", version: str = "1", settings: str = SETTINGS) -> dict[str, bytes]:
    return {"model.yaml": settings.encode(), f"{version}/model.onnx": data}
