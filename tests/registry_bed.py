"""Runs a model registry and its gRPC endpoint in this process, and makes models to upload."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock.client.registry import RegistryClient
from penstock.core.config import RegistrySettings
from penstock.endpoints.guard import Guard, create_open_guard
from penstock.endpoints.guarded_server import GuardedServer
from penstock.features.registry.manifest import Manifest, make_manifest
from penstock.features.registry.model_registry import ModelRegistry
from penstock.features.registry.registry_service import READ_S, ModelRegistryService
from penstock.features.registry.uploads import UploadRules
from penstock.pb.v1 import registry_pb2_grpc
from penstock.storage.metadata.metadata_store import MetadataStore
from penstock.storage.metadata.opening import open_metadata
from penstock.storage.objects.folder_objects import FolderObjects
from penstock.storage.objects.object_store import ObjectStore

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
        """Return the names of all objects in the store."""
        return {file.name for file in (self.folder / "objects").rglob("*") if file.is_file()}

    def staged(self) -> list[Path]:
        return [file for file in (self.folder / "uploads").rglob("*") if file.is_file()]


@asynccontextmanager
async def registry_bed(
    folder: Path,
    settings: RegistrySettings | None = None,
    rules: UploadRules | None = None,
    objects: ObjectStore | None = None,
    read_s: float = READ_S,
    guard: Guard | None = None,
) -> AsyncIterator[RegistryBed]:
    store = await open_metadata("sqlite:///metadata.db", folder)
    objects = objects or FolderObjects(folder / "objects")
    registry = ModelRegistry(store, objects, folder / "uploads", settings or RegistrySettings(), rules=rules)
    server = grpc.aio.server()
    endpoint = GuardedServer(server, guard or create_open_guard())
    registry_pb2_grpc.add_ModelRegistryServicer_to_server(ModelRegistryService(registry, read_s), endpoint)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield RegistryBed(folder, registry, store, objects, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
        await store.close()


def write_files(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    """Return the files by their SHA-256."""
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
