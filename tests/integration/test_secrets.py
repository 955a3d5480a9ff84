"""A server with every kind of secret, used correctly and incorrectly: no output and no file contains one."""

import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from typer.testing import CliRunner

from benchmarks.server import ServerProcess
from penstock.cli.main import app
from penstock.features.keys.key_table import KEY_BYTES, format_key_text
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.storage.server_folders import CONFIG_FILE
from tests.chaos.access.endpoints import WEBSOCKET, list_gateway_routes, list_grpc_endpoints
from tests.chaos.access.matrix import fill_path
from tests.servers import answered, floats, write_identity

SECRETS = {
    "access.secret": "the-secret-of-this-cluster-4711",
    "s3.secret_access_key": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "a trigger's secret": "whsec-Tr1gger-8fd3a1",
    "a store's password": "r3dis-Passw0rd",
    "api_key": format_key_text(b"\x07" * KEY_BYTES),
}
REDIS = "redis://penstock:{}@127.0.0.1:9/0".format(SECRETS["a store's password"])
WRONG = format_key_text(b"\x08" * KEY_BYTES)


class SecretServer:
    """A server with secrets in its file and its environment, and all output of it and its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []  # of the server and of commands
        self.texts = dict(SECRETS) | {"a wrong key": WRONG}
        (folder / "tmp").mkdir()
        write_identity(folder / "models", "numbers", "FP32")
        self.settings = {
            "access": {"secret": SECRETS["access.secret"], "limits_url": REDIS},
            "s3": {"access_key_id": "AKIAEXAMPLE", "secret_access_key": SECRETS["s3.secret_access_key"]},
            "telemetry": {"log_level": "debug"},
            "triggers": [{"on": ["*"], "url": "http://127.0.0.1:9/hook", "secret": SECRETS["a trigger's secret"]}],
        }
        self.environment = {
            "PENSTOCK_API_KEY": SECRETS["api_key"],
            "PENSTOCK_DATA_DIR": str(folder / "server/data"),
            "TMPDIR": str(folder / "tmp"),
        }

    def command(self, *words: str, shows: str = "") -> Any:
        """Run a command; with `shows`, its output may contain that principal's key once."""
        sockets = [f"unix:{file}" for file in (self.folder / "tmp").glob("*/manager.sock")]
        result = CliRunner().invoke(app, [*words, "--server", sockets[0], "--json"], env=self.environment)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        text = result.output
        if shows:
            self.texts[shows] = found["key"]
            text = text.replace(found["key"], "")
        self.said.append(text)
        return found

    def leaks(self, where: str, text: str) -> list[str]:
        """Return the secrets in the text, plain or base64-encoded as browsers send them."""
        found = [name for name, secret in self.texts.items() if secret in text]
        encoded = {
            name: b64encode(f":{secret}".encode()).decode().rstrip("=")[2:-2] for name, secret in self.texts.items()
        }
        found += [f"{name}, in base64" for name, each in encoded.items() if each in text]
        return [f"{name} in {where}" for name in found]

    def left(self) -> Iterator[str]:
        """Yield the secrets found in files of the data folder.

        The configuration file is left out. Processes read their settings in a folder that only the user can open, which
        may hold URLs with passwords and is removed when they end.
        """
        for file in self.folder.rglob("*"):
            if file.is_file() and file.name != "config.yaml":
                text = file.read_bytes().decode("latin-1")
                if file.name == CONFIG_FILE:
                    assert (file.stat().st_mode | file.parent.stat().st_mode) & 0o077 == 0
                    text = text.replace(REDIS, "")
                yield from self.leaks(str(file.relative_to(self.folder)), text)


@pytest.fixture(scope="module")
def secretive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SecretServer, ServerProcess]]:
    made = SecretServer(tmp_path_factory.mktemp("s"))
    folder = made.folder / "server"
    with ServerProcess(
        made.folder / "models", folder, "--keys", settings=made.settings, environment=made.environment
    ) as server:
        yield made, server


def forms(key: str) -> list[dict[str, str]]:
    """Return headers as callers send keys, including mistakes."""
    basic = b64encode(f"me:{key}".encode()).decode()
    return [
        {"authorization": f"Bearer {key}"},
        {"x-api-key": key},
        {"authorization": f"Basic {basic}"},
        {"authorization": f"Digest {key}"},
        {"authorization": key},
        {"authorization": f"Bearer {key}", "x-api-key": f"{key}x"},
        {"cookie": f"key={key}"},
    ]


def ask_everything(made: SecretServer, server: ServerProcess, admin: str) -> None:
    with httpx.Client(base_url=server.http_url, timeout=10.0) as client:
        document = client.get("/openapi.json", headers={"x-api-key": admin})
        for endpoint in list_gateway_routes(document.content):
            method, _, path = endpoint.name.partition(" ")
            if method == WEBSOCKET:
                continue
            tried = [(WRONG, headers) for headers in forms(WRONG)]
            if method == "GET" and path != "/v1/live":
                tried.append((admin, forms(admin)[0]))
            for key, headers in tried:
                answer = client.request(method, fill_path(path), headers=headers, params={"api_key": key})
                made.said.append(f"{answer.headers} {answer.text}")
        made.said.append(client.post("/v2/models/numbers/infer", content=b"{", headers={"x-api-key": admin}).text)
        made.said.append(client.get(f"/v2/models/{WRONG}", headers={"x-api-key": WRONG}).text)
        # The server gets the secret; the log does not.
        client.post(f"/v2/models/{WRONG}/infer", json={"inputs": []}, headers={"x-api-key": admin})
    with grpc.insecure_channel(server.grpc) as channel:
        for grpc_endpoint in list_grpc_endpoints("gateway"):
            for headers in forms(WRONG):
                call = channel.unary_stream(grpc_endpoint.name)(b"", metadata=tuple(headers.items()), timeout=10)
                try:
                    made.said.append(str(next(call, b"")))
                    call.cancel()
                except grpc.RpcError as error:
                    made.said.append(f"{error.details()} {error.trailing_metadata()} {error.debug_error_string()}")


def test_secrets_appear_nowhere(secretive: tuple[SecretServer, ServerProcess]) -> None:
    made, server = secretive
    admin = made.command("key", "create", "ops", "--scope", "admin", shows="the key of ops")["key"]
    app_key = made.command("key", "create", "app", "--rate", "5", shows="the key of app")["key"]
    rotated = made.command("key", "rotate", "app", "--grace", "1h", shows="the new key of app")["key"]
    for key in (app_key, rotated):
        with grpc.insecure_channel(server.grpc) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            question = floats("numbers", 1.0)
            metadata = (("authorization", f"Bearer {key}"),)
            answer = infer(question.SerializeToString(), metadata=metadata, timeout=30, wait_for_ready=True)
            assert answered(pb.ModelInferResponse.FromString(answer)) == [1.0]
    ask_everything(made, server, admin)
    made.command("key", "revoke", "app")
    for words in (("key", "list"), ("key", "show", "ops"), ("audit",), ("events",), ("cluster", "status")):
        made.command(*words)
    family = (psutil.Process(server.pid), *server.family())
    made.said += [" ".join(process.cmdline()) for process in family]
    found = [leak for number, said in enumerate(made.said) for leak in made.leaks(f"what was said ({number})", said)]
    assert sorted({*found, *made.left()}) == []
    log = server.log.read_text()
    assert "limits_not_shared" in log  # the error named the store that has the password
    assert any((made.folder / "tmp").glob("*/config.json"))
