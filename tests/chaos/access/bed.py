"""A cluster for access tests: a manager, a gateway and a worker process that require API keys."""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import grpc
import yaml

from benchmarks.hosts import HostProcess
from benchmarks.waiting import eventually
from penstock.client.cluster import ClusterClient
from penstock.core.principals import Scope
from penstock.pb.v1 import access_pb2
from penstock.storage.server_folders import MANAGER_SOCKET, RUN_PREFIX
from penstock.wire.credentials.authority import CA_FILE, Authority
from penstock.wire.credentials.client_tls import create_client_context, create_client_credentials
from penstock.wire.credentials.tls_files import TlsFiles

START_S = 90.0
HOSTS = ("localhost", "127.0.0.1")
ROLES = {"manager-1": ["join"], "gateway-1": ["join"], "worker-1": ["join"]}
Settings = Mapping[str, Any]


class GuardedBed:
    """A context manager for the cluster. With `authority`, ports use TLS and require its client certificates."""

    def __init__(
        self,
        models: Path,
        folder: Path,
        settings: Settings | None = None,
        authority: "BedAuthority | None" = None,
        principals: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.folder = folder
        self.models = models
        self.authority = authority
        self._settings = dict(settings or {})
        self._principals = {**ROLES, **(principals or {})}
        self._stack = ExitStack()
        self._roles: dict[str, HostProcess] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        told = self.role("manager", "manager_started", "--models", str(self.models), "--bind", "127.0.0.1:0")
        self.manager = str(told["address"])
        self.registry = str(self.line("manager", "registry_listening")["http"])
        self.join_key = self.create_key("hosts", [Scope.JOIN])
        self.role("worker", "", "--join", self.manager)
        ports = ("--http-port", "0", "--grpc-port", "0", "--bind", "127.0.0.1:0")
        endpoint = self.role("gateway", "gateway_started", "--join", self.manager, *ports)
        self.http, self.grpc, self.workers_endpoint = (
            str(endpoint[name]) for name in ("http", "grpc", "workers_endpoint")
        )
        self.health = {role: self.line(role, "health_listening") for role in ("manager", "worker")}
        with self.client("gateway-1") as client:
            eventually(lambda: client.get("/v2/health/ready").status_code == 200, "the gateway is ready", START_S)

    def role(self, role: str, event: str, *flags: str) -> dict[str, Any]:
        """Start a role and return the first line of its log with `event`."""
        given: dict[str, Any] = {"access": {"keys": "required"}, "registry": {"http_port": 0}, **self._settings}
        if self.authority is not None:
            tls = {"client_auth": "required", "principals": self._principals}
            given |= {"tls": {**self.authority.settings(f"{role}-1"), **tls}}
        config = self.folder / f"{role}.yaml"
        config.write_text(yaml.safe_dump(given))
        command = [sys.executable, "-m", "penstock", role, "--node", "here", "--config", str(config)]
        command += ["--data-dir", str(self.folder / role), *flags]
        if role != "gateway":
            command += ["--health-port", "0", "--health-grpc-port", "0"]
        key = {} if role == "manager" or self.authority else {"PENSTOCK_API_KEY": self.join_key}
        process = self._roles[role] = HostProcess(command, self.log(role), {**key, "TMPDIR": str(self.folder)})
        self._stack.callback(process.stop)
        return self.line(role, event) if event else {}

    def log(self, role: str) -> Path:
        return self.folder / f"{role}.log"

    def line(self, role: str, event: str) -> dict[str, Any]:
        process = self._roles[role]
        eventually(lambda: process.lines(event), f"the {role} logs '{event}': {process.log}", START_S)
        return process.lines(event)[0]

    # --- keys

    def ask(self, method: str, request: Any) -> Any:
        """Call the manager over its local socket, as the operator of the machine."""
        sockets = self.folder.glob(f"{RUN_PREFIX}*/{MANAGER_SOCKET}")
        with ClusterClient([f"unix:{file}" for file in sockets]) as client:
            return client.call(method, request)

    def create_key(
        self,
        name: str,
        scopes: Sequence[Scope],
        lives_s: float = 0.0,
        models: Sequence[str] = (),
        blocks: Sequence[str] = (),
    ) -> str:
        expires_at = time.time() + lives_s if lives_s else 0.0
        spec = access_pb2.KeySpec(name=name, scopes=scopes, expires_at=expires_at, models=models, blocks=blocks)
        return str(self.ask("CreateKey", access_pb2.CreateKeyRequest(spec=spec)).text)

    def revoke_key(self, name: str) -> None:
        self.ask("RevokeKey", access_pb2.RevokeKeyRequest(key=name))

    # --- reaching it

    def channel(self, address: str, certificate: str = "") -> grpc.aio.Channel:
        options = (("grpc.use_local_subchannel_pool", 1),)  # each channel has its own connection
        if self.authority is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = create_client_credentials(self.authority.files(certificate))
        return grpc.aio.secure_channel(address.replace("127.0.0.1", "localhost"), credentials, options=options)

    def client(self, certificate: str = "") -> Any:
        import httpx

        verify = True if self.authority is None else self.authority.context(certificate)
        return httpx.Client(base_url=self.http, verify=verify, timeout=30.0)


class BedAuthority:
    """Issues the certificates of the cluster's roles, and of callers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = Authority.create(folder, "an authority of the bed", 10)
        for role in ROLES:
            self.issue(role)

    def issue(self, name: str, *, is_client: bool = False) -> None:
        """Issue a certificate, which replaces an earlier certificate for `name`."""
        self._authority.issue(name, () if is_client else HOSTS, is_client=is_client)

    def settings(self, name: str) -> dict[str, str]:
        files = self.files(name)
        return {"cert": files.cert, "key": files.key, "ca": files.ca}

    def files(self, name: str = "") -> TlsFiles:
        """Return the TLS files of a caller; an empty `name` means a caller without a certificate."""
        cert, key = (str(self.folder / f"{name}{end}.pem") if name else "" for end in ("", "-key"))
        return TlsFiles(cert, key, str(self.folder / CA_FILE))

    def context(self, name: str = "") -> Any:
        return create_client_context(self.files(name))
