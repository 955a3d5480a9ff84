"""The configuration: one frozen tree from file, environment and flags. Nobody else reads the environment."""

import re
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from penstock.core.cluster.addresses import is_loopback, parse_address
from penstock.core.error_text import given_value
from penstock.core.errors import ConfigError
from penstock.core.principals import Scope
from penstock.core.settings import Section
from penstock.core.yaml_file import laid_over, read_yaml

Port = Annotated[int, Field(ge=0, le=65535)]
MAX_TASK_PROCESSES = 64


def _split(given: Any) -> Any:
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]  # a list, or names with commas between them


def _check_address(text: str) -> str:
    if text:
        parse_address(text)
    return text


def _with_commas(given: Any) -> Any:
    return ",".join(map(str, given)) if isinstance(given, list | tuple) else given


AddressText = Annotated[str, AfterValidator(_check_address)]


class Limits(Section):
    max_message_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    max_rows: Annotated[int, Field(ge=1)] = 4096  # of one request
    max_tokens: Annotated[int, Field(ge=1)] = 262_144  # of one request
    max_elements: Annotated[int, Field(ge=1)] = 1_000_000  # of one BYTES tensor
    max_prepared_bytes: Annotated[int, Field(ge=1024 * 1024)] = 1024 * 1024 * 1024  # in one worker; half for one model
    max_tensors: Annotated[int, Field(ge=1)] = 1024  # inputs of one request, and outputs
    max_parameters: Annotated[int, Field(ge=1)] = 1024  # of one request
    max_values: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024  # of one request that are not raw bytes
    max_keys: Annotated[int, Field(ge=1024)] = 256 * 1024  # of one request in JSON
    max_control_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024  # of one request that infers nothing
    max_decoding_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024  # of large requests, in one gateway
    max_inflight_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024  # in one gateway
    max_inflight_requests: Annotated[int, Field(ge=1)] = 10_000  # in one gateway
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024  # of one HTTP request's head, or of a gRPC call
    max_headers: Annotated[int, Field(ge=16)] = 256  # of one HTTP request
    header_timeout_s: Annotated[float, Field(gt=0)] = 20.0  # from a request's first byte to the end of its headers
    body_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # without a byte of a body that is not whole
    message_timeout_s: Annotated[float, Field(gt=0)] = 300.0  # until a request is whole
    answer_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # without a byte of an answer being taken
    idle_timeout_s: Annotated[float, Field(gt=0)] = 75.0  # of an HTTP connection, between requests
    max_connections: Annotated[int, Field(ge=1)] = 16_384  # to one gateway, of each protocol
    max_connection_calls: Annotated[int, Field(ge=1)] = 10_000  # on one gRPC connection at once
    client_share: Annotated[float, Field(gt=0, le=1)] = 0.8  # of connections, requests and bytes, for one address
    session_share: Annotated[float, Field(gt=0, le=1)] = 0.25  # of both, what may wait in sessions for earlier requests


class DataPlane(Section):
    beat_s: Annotated[float, Field(gt=0, le=60)] = 0.5  # heartbeats, both ways
    silence_s: Annotated[float, Field(gt=0, le=600)] = 5.0  # a peer that says nothing for so long is dead
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3  # runs of one request over workers' deaths
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 20.0  # what running requests get on SIGTERM
    restart_backoff_s: Annotated[float, Field(gt=0, le=60)] = 0.1  # first restart; doubles
    restart_backoff_max_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    hang_s: Annotated[float, Field(ge=1, le=3600)] = 5.0  # a process that neither speaks nor works is exchanged
    loop_hang_s: Annotated[float, Field(ge=1, le=86_400)] = 30.0  # and one whose event loop does not turn


class CacheSettings(Section):
    """The response cache; a model takes part where its model.yaml says so."""

    url: str = "memory://"  # or sqlite:///file, redis://host:port/0
    max_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024  # in one gateway
    ttl_s: Annotated[float, Field(gt=0)] = 3600.0
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 0.05  # what a shared cache gets to answer


class SessionSettings(Section):
    """Where gateways keep what the next owner of a session must know."""

    url: str = "memory://"  # each its own; or redis://host:port/0, for all
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 2.0  # what Redis gets to answer


class KeyLimitSettings(Section):
    """What each caller may ask for; 0: no limit."""

    requests_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    rows_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    tokens_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    burst_s: Annotated[float, Field(ge=0, le=86_400)] = 1.0  # what may come at once, in seconds of the rates
    concurrency: Annotated[int, Field(ge=0)] = 0


class WorkerSettings(Section):
    zone: str = ""  # of this server; routing by locality prefers workers of the gateway's own
    zones: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it; of single workers, by id
    labels: dict[str, str] = {}  # noqa: RUF012 - what blocks may ask for of the workers that hold them
    weights: dict[str, Annotated[float, Field(gt=0, le=1000)]] = {}  # noqa: RUF012 - by worker id; else 1
    memory_budget_bytes: Annotated[int, Field(ge=0)] = 0  # of a worker's models; 0: no bound
    # Of a worker, for models with placement: pool; auto: the workers share the cores but two
    task_processes: Annotated[int, Field(ge=1, le=MAX_TASK_PROCESSES)] | Literal["auto"] = "auto"
    task_workers: Annotated[int, Field(ge=0, le=64)] = 0  # of the server, for models with placement: worker
    engine_cache_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * 1024 * 1024  # of engines that TensorRT built
    engine_trial_s: Annotated[float, Field(ge=0, le=600)] = 5.0  # of a model with engine: auto, once; 0: no trial
    own_cores: bool = True  # each busy instance on the processor has a core to itself, where a server has one worker
    direct_port: Port | None = 0  # for clients, opened when one asks for it; 0: any that is free; None: no door

    def task_process_count(self, workers: int, cores: int) -> int:
        """`workers` are those of this machine, which have so many cores together."""
        if self.task_processes != "auto":
            return self.task_processes
        return min(MAX_TASK_PROCESSES, max(1, (cores - 2) // max(1, workers)))

    def zone_of(self, worker_id: str) -> str:
        return self.zones.get(worker_id, self.zones.get(_on_its_host(worker_id), self.zone))

    def weight_of(self, worker_id: str) -> float:
        return self.weights.get(worker_id, self.weights.get(_on_its_host(worker_id), 1.0))


def _on_its_host(worker_id: str) -> str:
    """In a cluster an id begins with the host's name."""
    return worker_id.rpartition(".")[2]


class RegistrySettings(Section):
    """Models that are uploaded, and what workers keep of them."""

    objects: str = ""  # their files: a path, file:///… or s3://bucket/prefix; empty: data_dir/objects
    max_files: Annotated[int, Field(ge=1, le=20_000)] = 10_000  # of one version
    max_model_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024 * 1024  # of one version
    max_uploads: Annotated[int, Field(ge=1)] = 64  # that are not finished
    upload_expiry_s: Annotated[float, Field(ge=1)] = 86_400.0  # without a byte of an upload
    http_port: Port | None = None  # REST, at the manager; None: 7412, or a free one where that is taken
    cache_dir: str = ""  # where workers keep what they fetched; empty: data_dir/model-cache
    cache_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024 * 1024  # of that, for all workers of a host
    is_direct: bool = False  # workers read the object store themselves, and not through the manager


class S3Settings(Section):
    """An S3-compatible store; what is empty here, the usual AWS_… variables say."""

    endpoint: str = ""  # https://HOST:PORT of any but Amazon's own
    ca: str = ""  # PEM, of the authority that its certificate comes from; empty: the system's
    region: str = ""
    access_key_id: str = ""
    secret_access_key: SecretStr | None = None
    is_virtual_hosted: bool = False  # the bucket is a part of the host's name, not of the path


class ClusterSettings(Section):
    """Where this host stands in a cluster of several; one machine alone needs none of it."""

    node: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9.-]{0,62})?$")] = ""  # this host; empty: its own name
    join: Annotated[str, BeforeValidator(_with_commas)] = ""  # managers, HOST[:PORT],… or etcd://…
    bind: AddressText = ""  # where its roles are reached by those of other hosts; empty: `host`
    curve: bool = True  # what gateways, workers and each other say over TCP is encrypted, and strangers are not heard
    advertise: AddressText = ""  # what they are told to reach it by; empty: where it listens
    lease_s: Annotated[float, Field(ge=2, le=60)] = 2.0  # of several managers the one that leads is silent for less
    # A worker that a manager does not hear for so long is suspect, and then offline; one whose connection ended is
    # offline earlier; one that was offline for so long is forgotten.
    suspect_s: Annotated[float, Field(ge=1, le=3600)] = 2.0
    offline_s: Annotated[float, Field(ge=1, le=86_400)] = 5.0
    reconnect_s: Annotated[float, Field(ge=0, le=86_400)] = 2.0
    forget_s: Annotated[float, Field(ge=1)] = 3600.0

    @model_validator(mode="after")
    def _lives_in_order(self) -> "ClusterSettings":
        if not self.suspect_s < self.offline_s <= self.forget_s:
            raise ValueError(
                f"a worker is suspect before it is offline, and forgotten last: suspect_s ({self.suspect_s:g}) has to "
                f"be below offline_s ({self.offline_s:g}), and that not above forget_s ({self.forget_s:g})"
            )
        return self

    @property
    def node_name(self) -> str:
        return self.node or re.sub(r"[^A-Za-z0-9.-]", "-", gethostname())[:63].strip("-.") or "node"


class AccessSettings(Section):
    """Whom doors ask for a key, and how much a caller may ask for."""

    keys: Literal["auto", "required", "off"] = "auto"  # auto: once one was made
    secret: SecretStr | None = None  # of the cluster, for the digests of keys; None: made, and kept in the store
    signing_rotate_s: Annotated[float, Field(ge=1)] = 86_400.0  # after which session tokens are signed with a new key
    limits_url: str = "memory://"  # each gateway its share; or redis://host:port/0, all together
    limits_timeout_s: Annotated[float, Field(gt=0, le=60)] = 0.25  # what Redis gets to answer
    key_limits: KeyLimitSettings | None = None  # of each key that has none of its own
    anonymous_limits: KeyLimitSettings | None = None  # of each address, where no key is asked for

    @model_validator(mode="after")
    def _secret_is_long(self) -> "AccessSettings":
        if self.secret is not None and len(self.secret.get_secret_value()) < 16:
            raise ValueError("access.secret has at least 16 characters, that nobody can guess")
        return self


class TlsSettings(Section):
    """The certificate of this host's roles: at every port of theirs, and towards each other."""

    cert: str = ""  # PEM, with the certificates between it and its authority's; empty: ports are plain
    key: str = ""  # PEM, for its owner alone
    ca: str = ""  # PEM, the authorities that others' certificates come from; empty: the system's
    client_auth: Literal["none", "optional", "required"] = "none"  # whether callers show a certificate
    principals: dict[str, tuple[Scope, ...]] = {}  # noqa: RUF012 - what owners of certificates may do, by name or pattern

    @model_validator(mode="after")
    def _fits(self) -> "TlsSettings":
        if bool(self.cert) != bool(self.key):
            raise ValueError("a certificate and its key belong together: give both, tls.cert and tls.key")
        if self.client_auth != "none" and not (self.cert and self.ca):
            raise ValueError(
                "tls.client_auth needs tls.cert and tls.ca, the authority that callers' certificates are of"
            )
        if self.principals and self.client_auth == "none":
            raise ValueError("tls.principals needs tls.client_auth: callers show no certificate")
        return self


class GatewaySettings(Section):
    """The clients' doors."""

    grpc_server: Literal["auto", "native", "grpcio"] = "auto"  # auto: native where it can do what is asked for


class HealthSettings(Section):
    """The door where a manager, a worker or a joined machine says how it is."""

    host: str = "127.0.0.1"
    http_port: Port | None = None  # None: the role's usual one, or a free one where that is taken
    grpc_port: Port | None = None


class TriggerSettings(Section):
    """What an event calls."""

    on: Names = ("*",)  # kinds of events, with * for any letters
    command: tuple[str, ...] = ()  # a program and its arguments
    url: Annotated[str, Field(pattern=r"^(https?://[^/?#\s]+\S*)?$")] = ""
    secret: SecretStr | None = None  # that what is sent to the URL is signed with
    timeout_s: Annotated[float, Field(gt=0, le=300)] = 10.0  # of one attempt
    attempts: Annotated[int, Field(ge=1, le=10)] = 3

    @property
    def name(self) -> str:
        return self.url.partition("?")[0] or self.command[0]

    @model_validator(mode="after")
    def _calls_one_thing(self) -> "TriggerSettings":
        if bool(self.url) == bool(self.command):
            raise ValueError("a trigger has a command or a url")
        if self.url and (self.secret is None or len(self.secret.get_secret_value()) < 16):
            raise ValueError("a trigger's url needs a secret of at least 16 characters, to sign what is sent")
        return self


class Telemetry(Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    otlp_endpoint: str = ""  # empty: no spans leave the process
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0


class Config(Section):
    models: Path = Path("models")
    data_dir: Path = Path("penstock-data")
    host: str = "127.0.0.1"
    insecure: bool = False  # a host that others reach may be open to all of them
    api_key: SecretStr | None = None  # what roles and commands of this machine show to others
    api_key_file: Path | None = None  # a file that has it
    allowed_hosts: Names = ()  # further names that clients may call the server by
    allowed_origins: Names = ()  # whose pages may call it from browsers
    allow_shared_memory: bool = False  # clients of this machine may register regions
    http_port: Port = 8080
    grpc_port: Port = 50051
    gateways: Annotated[int, Field(ge=0, le=64)] = 1
    workers: Annotated[int, Field(ge=0, le=64)] = 1
    gateway: GatewaySettings = GatewaySettings()
    limits: Limits = Limits()
    data_plane: DataPlane = DataPlane()
    response_cache: CacheSettings = CacheSettings()
    sessions: SessionSettings = SessionSettings()
    worker: WorkerSettings = WorkerSettings()
    registry: RegistrySettings = RegistrySettings()
    s3: S3Settings = S3Settings()
    cluster: ClusterSettings = ClusterSettings()
    access: AccessSettings = AccessSettings()
    tls: TlsSettings = TlsSettings()
    health: HealthSettings = HealthSettings()
    triggers: tuple[TriggerSettings, ...] = ()  # what events call
    telemetry: Telemetry = Telemetry()

    @property
    def is_local(self) -> bool:
        """Whether only this machine's clients reach it."""
        return is_loopback(self.host)

    def check_reach(self, host: str = "") -> None:
        """Refuses what listens where other machines reach it and asks nobody; without `host`, the clients' doors."""
        host = host or self.host
        if not is_loopback(host) and not self.insecure and not self.has_keys:
            raise ConfigError(
                f"host '{host}' is open to other machines: whoever reaches it could run, load and unload models. Ask "
                "for keys (--keys, setting access.keys: required; `penstock key create` makes them), or give "
                "--insecure (setting insecure) where the network keeps others out"
            )

    @property
    def has_keys(self) -> bool:
        """Whether it is meant to ask for keys: a role that has one itself does."""
        return self.access.keys == "required" or (self.access.keys == "auto" and self.shown_key() != "")

    def asks_at(self, host: str) -> Literal["auto", "required", "off"]:
        """Whether a door there asks who comes: beyond this machine always, unless it is meant to be open, and where
        certificates stand for somebody."""
        is_open_to_others = not is_loopback(host) and not self.insecure
        is_asked = is_open_to_others or bool(self.tls.principals)
        return "required" if self.access.keys == "auto" and is_asked else self.access.keys

    def shown_key(self) -> str:
        """What it shows to others; empty: nothing."""
        if self.api_key is not None:
            return self.api_key.get_secret_value().strip()
        if self.api_key_file is None:
            return ""
        try:
            return self.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.api_key_file}: the key cannot be read: {error}") from error


class _Environment(Config, BaseSettings):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", env_nested_delimiter="__", extra="forbid")


def load_config(file: Path | None = None, **flags: Any) -> Config:
    """Flags win over the environment, the environment over the file, the file over the defaults."""
    from_file = read_yaml(file, Config).model_dump(exclude_unset=True) if file else {}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        environment = _Environment().model_dump(exclude_unset=True)
        return Config.model_validate(laid_over(laid_over(from_file, environment), given))
    except ValidationError as error:
        first = error.errors()[0]
        parts = [part for part in map(str, first["loc"]) if not part.startswith(("constrained-", "literal["))]
        name = "__".join(parts).upper()  # without pydantic's own names for the members of a union
        said = str(first["msg"]).removeprefix("Value error, ")
        value = given_value(first["loc"], first["input"])
        raise ConfigError(f"setting PENSTOCK_{name} or its flag: {said}{value and f', got {value}'}") from error


def environment_key() -> SecretStr | None:
    """What PENSTOCK_API_KEY says: it is written nowhere."""
    return _Environment().api_key
