"""The clients and every command against a server with TLS that requires keys."""

import asyncio
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from PIL import Image
from typer.testing import CliRunner

import penstock.client
from benchmarks.server import find_local_managers
from benchmarks.waiting import eventually
from penstock.cli import main as cli
from penstock.client import AsyncClient, Client
from penstock.client.client_options import ClientOptions
from penstock.client.websocket import stream_raw
from penstock.core.errors import PenstockError, RateLimited, Unauthenticated, Unavailable, UnknownModel
from penstock.core.tensors import Array
from tests.servers import ROOT, write_factor, write_identity, write_model
from tests.tls import TestAuthority, TlsServer


@dataclass(frozen=True)
class Served:
    server: TlsServer
    authority: TestAuthority
    folder: Path
    key: str

    @property
    def options(self) -> ClientOptions:
        return {"api_key": self.key, "ca": self.authority.ca}

    def run(self, *arguments: str, key: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
        shown = {"PENSTOCK_API_KEY": key} if key else {}
        return subprocess.run(
            [sys.executable, "-m", "penstock", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **shown, **environment},
            check=False,
        )

    def make_key(self, name: str, *options: str) -> str:
        made = self.run("key", "create", name, *options, PENSTOCK_DATA_DIR=str(self.folder / "data"))
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sdk")
    models = folder / "models"
    write_factor(models, "factor", 2.0)
    write_identity(models, "bytes", "BYTES")
    write_factor(models, "doubles", 2.0)
    write_pets(models)
    for name in ("minilm", "srcnn", "smollm2"):
        (models / name).symlink_to(ROOT / "models" / name)
    authority = TestAuthority(folder / "certs")
    with TlsServer(authority, models, folder, {**authority.settings(), "workers": 2}) as server:
        first = Served(server, authority, folder, "")
        yield Served(server, authority, folder, first.make_key("all", "--scope", "admin"))
        assert not server.tracebacks()


def write_pets(models: Path) -> None:
    """Write a classifier of two numbers."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["logits"])],
        "pets",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2])],
    )
    write_model(models, "pets", graph)
    (models / "pets/model.yaml").write_text("task: classify\n")
    (models / "pets/1/labels.txt").write_text("cat\ndog\n")


def numbers(*values: float) -> dict[str, Array]:
    return {"x": np.array([values], np.float32)}


def test_both_clients_send_their_key_over_tls(served: Served) -> None:
    address = f"https://{served.server.grpc}"
    with Client(address, **served.options) as client:
        assert client.infer("factor", numbers(1, 2))["y"].tolist() == [[2, 4]]
        assert {"bytes", "factor", "minilm"} <= {entry.name for entry in client.models()}

    async def ask() -> Array:
        async with AsyncClient(served.server.grpc, **served.options) as client:
            assert await client.is_ready()
            return (await client.infer("factor", numbers(3)))["y"]

    assert asyncio.run(ask()).tolist() == [[6]]


@pytest.mark.parametrize("key", ["", "psk_" + "a" * 43])
def test_invalid_keys_are_reported(served: Served, key: str) -> None:
    with Client(served.server.grpc, ca=served.authority.ca, api_key=key) as client:
        assert client.is_ready()
        with pytest.raises(Unauthenticated):
            client.infer("factor", numbers(1))

    async def ask() -> None:
        async with AsyncClient(served.server.grpc, ca=served.authority.ca, api_key=key) as client:
            await client.infer("factor", numbers(1))

    with pytest.raises(Unauthenticated):
        asyncio.run(ask())


def test_a_keys_models_and_rate_limit_apply(served: Served) -> None:
    options: ClientOptions = {
        "ca": served.authority.ca,
        "api_key": served.make_key("few", "--model", "factor", "--rate", "0.01"),
    }
    with Client(served.server.grpc, **options) as client:
        with pytest.raises(UnknownModel):
            client.infer("bytes", {"x": np.array([[b"a"]], object)})
        client.infer("factor", numbers(1))
        with pytest.raises(RateLimited) as unary:
            client.infer("factor", numbers(1))

    async def ask() -> None:
        async with AsyncClient(served.server.grpc, **options) as client:
            await client.infer("factor", numbers(1))

    with pytest.raises(RateLimited) as streamed:
        asyncio.run(ask())
    for refused in (unary.value, streamed.value):
        assert refused.fields["limit"] == "requests"
        assert 10 < refused.retry_after_s <= 100


def test_an_untrusted_server_gets_no_request(served: Served) -> None:
    with Client(served.server.grpc, tls=True, api_key=served.key) as client, pytest.raises(Unavailable, match="TLS"):
        client.infer("factor", numbers(1))


def test_frames_are_streamed_over_a_websocket(served: Served) -> None:
    async def frames() -> AsyncIterator[bytes]:
        for frame in (b"one", b"two"):
            yield frame

    async def ask() -> list[bytes | PenstockError]:
        url = f"https://localhost:{served.server.http_port}"
        return [each async for each in stream_raw(frames(), "bytes", url, ("x", "y"), **served.options)]

    assert asyncio.run(ask()) == [b"one", b"two"]


def test_every_command_sends_the_key_and_verifies_the_server(served: Served) -> None:
    (served.folder / "key").write_text(served.key + "\n")
    grpc, http = ("--server", served.server.grpc), ("--server", f"127.0.0.1:{served.server.http_port}")
    steps = ("--window", "0.1", "--warm-up", "0", "--concurrency", "1", "--windows", "3")
    bench = ("bench", "factor", "--shape", "x:1,4", *http, *steps)
    trusted = {"PENSTOCK_TLS__CA": served.authority.ca}
    for arguments in (
        ("embed", "a cat", *grpc),
        ("rerank", "animals", "a cat", "a stone", *grpc),
        ("infer", "factor", "--input", "x=[[1, 2]]", *grpc),
        ("generate", "Water boils at", "--max-tokens", "2", *grpc),
        ("status", *http),
        ("top", "--once", "--json", *http),
    ):
        told = CliRunner().invoke(cli.app, arguments, env={"PENSTOCK_API_KEY": served.key, **trusted})
        assert told.exit_code == 0, (arguments, told.output)
    for command in (
        ("chat", "Name a river.", "--max-tokens", "2", *grpc),
        (*bench, "--protocol", "grpc"),
        (*bench, "--protocol", "rest"),
    ):
        done = served.run(*command, key=served.key, **trusted)
        assert done.returncode == 0, (command, done.stderr)
    for arguments in (("embed", "a cat", *grpc), ("status", *http)):
        refused = served.run(*arguments, "--ca", served.authority.ca)
        assert refused.returncode == 2, arguments
        assert "key" in refused.stderr, refused.stderr
    by_file = served.run("status", *http, "--json", "--key-file", "key", "--ca", served.authority.ca, key="psk_other")
    assert json.loads(by_file.stdout)["ready"], by_file.stderr


# --- direct


def worker_of(client: Client | AsyncClient, model: str = "factor") -> str:
    calls = client if isinstance(client, AsyncClient) else client._calls
    assert calls._routes is not None
    model_route = calls._routes._models.get((model, ""))
    return model_route.route.worker_id if model_route is not None and model_route.route is not None else ""


def _calls_a_worker(client: Client) -> bool:
    assert client.infer("factor", numbers(1, 2))["y"].tolist() == [[2, 4]]
    return worker_of(client) != ""


def test_a_blocking_client_connects_directly_and_falls_back(served: Served) -> None:
    with Client(served.server.grpc, api_key=served.key, ca=served.authority.ca, direct=True) as client:
        eventually(lambda: _calls_a_worker(client), "a worker answers directly")  # a busy one is called later
        first = worker_of(client)
        assert first.startswith("worker-")
        assert [each["y"].tolist() for each in client.infer_stream("factor", numbers(4))] == [[[8]]]
        stopped = served.server.children("worker")[first]
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert client.infer("factor", numbers(3), timeout_s=20)["y"].tolist() == [[6]]
            assert client.infer("factor", numbers(5), timeout_s=20)["y"].tolist() == [[10]]
            assert worker_of(client) != first
        finally:
            with suppress(ProcessLookupError):  # the worker may have been replaced by now
                os.kill(stopped, signal.SIGCONT)
        with pytest.raises(UnknownModel):
            client.infer("nothing", numbers(1))


def test_no_request_fails_while_its_worker_is_killed(served: Served) -> None:
    options: ClientOptions = {**served.options, "direct": "auto"}

    async def ask() -> set[str]:
        workers = set[str]()
        async with AsyncClient(served.server.grpc, **options) as client:
            end = time.monotonic() + 60

            async def load(number: int) -> None:
                while len(workers - {""}) < 2 and time.monotonic() < end:
                    found = await client.infer("factor", numbers(number), timeout_s=20)
                    assert found["y"].tolist() == [[2 * number]]
                    workers.add(worker_of(client))

            async def kill() -> None:
                while not worker_of(client):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                os.kill(served.server.children("worker")[worker_of(client)], signal.SIGKILL)

            await asyncio.gather(kill(), *(load(number) for number in range(8)))
            return workers

    assert {"worker-0", "worker-1"} <= asyncio.run(ask())


# --- the documentation's examples

PAGE = ROOT / "docs" / "client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def public_names() -> set[str]:
    methods = {name for kind in (Client, AsyncClient) for name in dir(kind) if not name.startswith("_")}
    return {*penstock.client.__all__, *methods, "ClusterClient", "RegistryClient", "stream_raw"}


def test_every_public_name_has_an_example() -> None:
    told = set(re.findall(r"\w+", "\n".join(EXAMPLES)))
    assert public_names() <= told


def test_every_example_runs(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (24, 16), "olive").save(tmp_path / "photo.png")
    (tmp_path / "lines.txt").write_text("".join(f"line {number}\n" for number in range(200)))
    monkeypatch.chdir(tmp_path)
    (manager,) = find_local_managers(served.folder / "data")
    here = {
        "localhost:50051": served.server.grpc,
        "localhost:8080": f"localhost:{served.server.http_port}",
        "localhost:7400": manager,
        "psk_…": served.key,
        "certs/ca.pem": served.authority.ca,
    }
    names: dict[str, object] = {}
    for example in EXAMPLES:
        for written, meant in here.items():
            example = example.replace(written, meant)
        exec(compile(example, PAGE.name, "exec"), names)
    told = capsys.readouterr().out
    for expected in ("(2, 384)", "[[('dog', 0.8", "[[2. 4.]]", "200 rows", "(72, 384)", "unknown model", "Paris"):
        assert expected in told


# --- the client as a separate wheel

WITH_CLIENT_ONLY = """
import asyncio, pkgutil, sys
import numpy as np
import penstock.client
from penstock.client import AsyncClient, Client

address, key, ca = sys.argv[1:]
inputs = {"x": np.array([[1, 2]], np.float32)}
with Client(address, api_key=key, ca=ca) as client:
    print(client.infer("factor", inputs)["y"].tolist(), client.embed(["a cat"]).shape)

async def ask():
    async with AsyncClient(f"https://{address}", api_key=key, ca=ca) as client:
        print((await client.infer("factor", inputs))["y"].tolist())

asyncio.run(ask())
for each in pkgutil.iter_modules(penstock.client.__path__, "penstock.client."):
    if each.name != "penstock.client.websocket":  # an extra
        __import__(each.name)
print(" ".join(sorted(sys.modules[name].__file__ for name in sys.modules if name.startswith("penstock"))))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    for project in (ROOT / "client", ROOT):
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=project, check=True, capture_output=True, timeout=60)
    return {wheel.name.partition("-")[0]: wheel for wheel in folder.iterdir()}


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def required_by(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def unpack(folder: Path, *wheels: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-compile", "--target", str(folder), *map(str, wheels)], check=True, timeout=60)
    return folder


def test_no_file_is_in_both_wheels(wheels: dict[str, Path]) -> None:
    client, server = files_of(wheels["penstock_client"]), files_of(wheels["penstock_serve"])
    assert not client & server
    files = [*(ROOT / "src/penstock").rglob("*.py"), *(ROOT / "src/penstock").rglob("*.pyi")]
    sources = {str(file.relative_to(ROOT / "src")) for file in files}
    assert sources <= client | server
    version = wheels["penstock_serve"].name.split("-")[1]
    assert f"penstock-client=={version}" in required_by(wheels["penstock_serve"])
    names = {re.split("[<>=;]", each)[0] for each in required_by(wheels["penstock_client"]) if "extra ==" not in each}
    assert names == {"grpcio", "ml-dtypes", "numpy", "protobuf"}


def test_the_client_wheel_alone_is_enough(served: Served, wheels: dict[str, Path], tmp_path: Path) -> None:
    site = unpack(tmp_path / "site", wheels["penstock_client"])
    for package in ("grpcio", "ml-dtypes", "numpy", "protobuf", "typing-extensions"):
        for file in importlib.metadata.files(package) or ():
            if not (top := site / file.parts[0]).exists() and file.parts[0] not in ("..", "__pycache__"):
                top.symlink_to(Path(str(importlib.metadata.distribution(package).locate_file(file.parts[0]))))
    code = f"import sys; sys.path.append({str(site)!r})\n{WITH_CLIENT_ONLY}"
    arguments = (served.server.grpc, served.key, served.authority.ca)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    *answers, loaded = done.stdout.splitlines()
    assert answers == ["[[2.0, 4.0]] (1, 384)", "[[2.0, 4.0]]"]
    # The wheel contains exactly what the client imports, and messages unchanged.
    shipped = {name for name in files_of(wheels["penstock_client"]) if name.endswith(".py") and "/pb/" not in name}
    imported = {str(Path(file).relative_to(site)) for file in loaded.split() if "/pb/" not in file}
    assert shipped - {"penstock/client/websocket.py"} == imported


def test_both_wheels_install_together(wheels: dict[str, Path], tmp_path: Path) -> None:
    site = unpack(tmp_path / "site", *wheels.values())
    code = "import penstock.cli.main, penstock.client.calls, penstock.client.websocket as w; print(w.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith(str(site)), done.stderr
