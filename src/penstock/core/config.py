"""The configuration: one frozen tree from file, environment and flags. No other module reads the environment."""

import os
import re
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from penstock.core.cluster.addresses import is_loopback, parse_address
from penstock.core.error_text import describe_given_value, describe_problem, explain_cause
from penstock.core.errors import ConfigError
from penstock.core.principals import Scope
from penstock.core.removed_settings import explain_removal
from penstock.core.settings import Section
from penstock.core.yaml_file import merge_settings, read_yaml

Port = Annotated[int, Field(ge=0, le=65535)]
MAX_TASK_PROCESSES = 64
SERVER_NAME = "penstock"  # in the metadata of every protocol


def _split_names(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]  # a list, or names separated by commas


def _check_address(text: str) -> str:
    if text:
        parse_address(text)
    return text


def _join_with_commas(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


AddressText = Annotated[str, AfterValidator(_check_address)]


class Limits(Section):
    max_message_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    max_rows: Annotated[int, Field(ge=1)] = 4096  # per request
    max_tokens: Annotated[int, Field(ge=1)] = 262_144  # per request
    # Of prepared inputs in one worker; one model may use half of it.
    max_prepared_bytes: Annotated[int, Field(ge=1024 * 1024)] = 1024 * 1024 * 1024
    max_inflight_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024  # in one gateway
    max_inflight_requests: Annotated[int, Field(ge=1)] = 10_000  # in one gateway
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024  # of one HTTP request or gRPC call
    header_timeout_s: Annotated[float, Field(gt=0)] = 20.0  # from a request's first byte to the end of its headers
    body_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # between two reads of an incomplete request body
    message_timeout_s: Annotated[float, Field(gt=0)] = 300.0  # until a request has arrived completely
    answer_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # while the client reads nothing of its answer
    idle_timeout_s: Annotated[float, Field(gt=0)] = 75.0  # of an HTTP connection, between requests
    max_connections: Annotated[int, Field(ge=1)] = 16_384  # to one gateway, per protocol
    # The share of a gateway's connections, requests and bytes that one client address may use.
    client_share: Annotated[float, Field(gt=0, le=1)] = 0.8

    # Constants; only tests override them, in a subclass. Real requests stay far below these counts. Parsing a message
    # that reaches one of the counts takes some hundred MiB.
    max_tensors: ClassVar[int] = 1024  # inputs of one request; outputs likewise
    max_parameters: ClassVar[int] = 1024  # per request
    max_values: ClassVar[int] = 4 * 1024 * 1024  # per request, not counting raw bytes
    max_keys: ClassVar[int] = 256 * 1024  # per JSON request
    max_control_bytes: ClassVar[int] = 64 * 1024  # of a request other than inference; real requests have a few KiB
    # Of the large requests that one gateway decodes at the same time: the default of max_inflight_bytes.
    max_decoding_bytes: ClassVar[int] = 256 * 1024 * 1024
    max_headers: ClassVar[int] = 256  # per HTTP request: browsers and proxies send dozens, Envoy accepts 100
    # Concurrent calls on one gRPC connection: the default of max_inflight_requests, because gRPC fails the calls above
    # the limit, and some just below it, with UNAVAILABLE.
    max_connection_calls: ClassVar[int] = 10_000
    # The share of a gateway's requests and bytes that may wait in ordered sessions for earlier requests.
    session_share: ClassVar[float] = 0.25

    @property
    def max_text_bytes(self) -> int:
        """Return how many bytes of memory all texts in the JSON of one request may take."""
        return self.max_message_bytes * 3 // 2


class DataPlane(Section):
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 20.0  # for running requests to finish after SIGTERM
    hang_s: Annotated[float, Field(ge=1, le=3600)] = 5.0  # a process that makes no progress for this long is replaced

    # Constants; only tests override them, in a subclass.
    beat_s: ClassVar[float] = 0.5  # between heartbeats, in both directions
    silence_s: ClassVar[float] = 5.0  # a peer counts as dead after this silence: ten beats, because machines are busy


class CacheSettings(Section):
    """Settings of the response cache, which models enable in model.yaml."""

    url: str = "memory://"  # or sqlite:///file, redis://host:port/0
    max_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024  # in one gateway
    ttl_s: Annotated[float, Field(gt=0)] = 3600.0


class RequestLogSettings(Section):
    """Settings of the request log."""

    url: str = ""  # sqlite:///file or postgresql://…; empty: requests are not logged
    retention_days: Annotated[float, Field(gt=0)] | None = 30.0  # null: rows are never removed
    partition_hours: Annotated[int, Field(ge=1, le=8760)] = 24  # of time in one partition or chunk of PostgreSQL
    buffer_bytes: Annotated[int, Field(ge=64 * 1024)] = 64 * 1024 * 1024  # of rows that wait in one gateway
    payload_bytes: Annotated[int, Field(ge=0, le=65_536)] = 4096  # stored of each payload column; 0: none

    @property
    def retention_us(self) -> int | None:
        return None if self.retention_days is None else int(self.retention_days * 86_400_000_000)


class SessionSettings(Section):
    """Settings of the store of session records, from which a session's next owner continues."""

    url: str = "memory://"  # in each gateway; or redis://host:port/0, shared by all


class AsyncSettings(Section):
    """Settings of asynchronous requests, whose answers clients fetch later."""

    url: str = "sqlite:///"  # a file in the data directory; or redis://host:port/0, shared by all gateways
    max_running: Annotated[int, Field(ge=1)] = 256  # in one gateway
    max_requests: Annotated[int, Field(ge=1)] = 10_000  # stored, running or finished
    max_bytes: Annotated[int, Field(ge=1024)] = 1024 * 1024 * 1024  # of all stored answers
    ttl_s: Annotated[float, Field(gt=0, le=2_592_000)] = 3600.0  # that an answer is kept

    # Constants; only tests override them, in a subclass.
    max_result_bytes: ClassVar[int] = 64 * 1024 * 1024  # of one answer: the default of limits.max_message_bytes
    max_run_s: ClassVar[float] = 3600.0  # the caller's timeout or the model's timeouts.request_s usually ends it before


class SearchSettings(Section):
    """Settings of the search that chooses the block for a request with a query."""

    session_ttl_s: Annotated[float, Field(gt=0)] = 600.0  # until a session's query is resolved again
    embedding_model: str = "minilm"  # the block that embeds texts for the semantic policy
    policy_timeout_s: Annotated[float, Field(gt=0, le=60)] = 1.0  # for one answer of a registered policy
    policy_memory_mb: Annotated[int, Field(ge=64)] = 256  # of one registered policy's process
    max_policy_processes: Annotated[int, Field(ge=1, le=64)] = 4  # of one gateway

    # A constant; only tests override it, in a subclass.
    max_sessions: ClassVar[int] = 100_000  # whose blocks one gateway remembers; one takes about 300 bytes

    @property
    def timeout_s(self) -> float:
        """Return the timeout of a search: the timeout of a registered policy's answer, plus four seconds."""
        return 4.0 + self.policy_timeout_s


class KeyLimitSettings(Section):
    """Rate and concurrency limits of one caller. 0 means: no limit."""

    requests_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    rows_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    tokens_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    burst_s: Annotated[float, Field(ge=0, le=86_400)] = 1.0  # the allowed burst, in seconds of the rates
    concurrency: Annotated[int, Field(ge=0)] = 0


class QuotaSettings(Section):
    """Settings of this server's quotas, which apply in addition to the callers' limits. 0 means: no quota."""

    requests_per_second_total: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    requests_per_second_per_session: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    requests_per_second_per_block_id: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    requests_per_session_id: Annotated[int, Field(ge=0)] = 0  # in reset_s
    requests_per_block_id: Annotated[int, Field(ge=0)] = 0  # in reset_s
    reset_s: Annotated[int, Field(ge=1, le=31_536_000)] = 86_400  # period of the totals, counted from 1970 (UTC)

    def to_document(self) -> dict[str, float]:
        """Return the quotas in the form in which the server registers them with a directory."""
        return {name: value for name, value in self.model_dump().items() if value and name != "reset_s"}


class DirectorySettings(Section):
    """Settings of the directory with which this server registers, or which `penstock directory` serves."""

    url: Annotated[str, Field(pattern=r"^(https?://[^/?#\s]+\S*)?$")] = ""  # empty: the server registers nowhere
    public_url: Annotated[str, Field(max_length=2048)] = ""  # where clients reach this server
    name: str = ""  # of this server; empty: the host's name in the cluster
    tags: Names = ()
    metadata: dict[str, Any] = {}  # noqa: RUF012 - such as region and provider
    lease_s: Annotated[float, Field(ge=3, le=86_400)] = 30.0  # the directory removes a record that is not renewed
    key_file: Path | None = None  # a file with the key that this server sends to the directory
    ca: str = ""  # PEM file with the authority of the directory's certificate; empty: tls.ca
    store: str = "sqlite:///directory.db"  # of `penstock directory`; or mongodb://host:port/database
    http_port: Port | None = None  # of `penstock directory`; null: 7450, or a free port if that is taken

    @model_validator(mode="after")
    def _check_url(self) -> "DirectorySettings":
        if self.public_url and not self.url:
            raise ValueError("directory.public_url needs directory.url, the directory to register with (--directory)")
        return self


class WorkerSettings(Section):
    zone: str = ""  # of this server; routing by locality prefers workers in the gateway's zone
    labels: dict[str, str] = {}  # noqa: RUF012 - that blocks may require of their workers
    weights: dict[str, Annotated[float, Field(gt=0, le=1000)]] = {}  # noqa: RUF012 - by worker id; default 1
    memory_budget_bytes: Annotated[int, Field(ge=0)] = 0  # for all models of one worker; 0: no limit
    # Of one worker, for models with placement: pool. auto: all cores but two, divided among the workers
    task_processes: Annotated[int, Field(ge=1, le=MAX_TASK_PROCESSES)] | Literal["auto"] = "auto"
    engine_cache_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * 1024 * 1024  # for engines that TensorRT built
    engine_trial_s: Annotated[float, Field(ge=0, le=600)] = 5.0  # to compare engines once for engine: auto; 0: no trial
    direct_port: Port | None = 0  # for direct clients, opened on request; 0: any free port; null: no direct endpoint

    def compute_task_processes(self, workers: int, cores: int) -> int:
        """Return the number of task processes per worker if `workers` share `cores`."""
        if self.task_processes != "auto":
            return self.task_processes
        return min(MAX_TASK_PROCESSES, max(1, (cores - 2) // max(1, workers)))

    def find_weight(self, worker_id: str) -> float:
        return self.weights.get(worker_id, self.weights.get(_remove_host_name(worker_id), 1.0))


def _remove_host_name(worker_id: str) -> str:
    """Return a worker's id without the host name, which is the first part of every id in a cluster."""
    return worker_id.rpartition(".")[2]


class RegistrySettings(Section):
    """Settings of the model registry, and of the workers' copies of registered models."""

    objects: str = ""  # the object store: a path, file:///… or s3://bucket/prefix; empty: data_dir/objects
    max_model_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024 * 1024  # of one version
    http_port: Port | None = None  # of the manager's REST API; null: 7412, or a free port if that is taken
    cache_dir: str = ""  # the workers' copies of models; empty: data_dir/model-cache
    cache_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024 * 1024  # for all workers of a host
    is_direct: bool = False  # workers read the object store themselves instead of through the manager


class S3Settings(Section):
    """Settings of an S3-compatible store. Empty settings take their values from the usual AWS_… variables."""

    endpoint: str = ""  # https://HOST:PORT; empty: Amazon's own
    ca: str = ""  # PEM file with the store's certificate authority; empty: the system's authorities
    region: str = ""
    access_key_id: str = ""
    secret_access_key: SecretStr | None = None
    is_virtual_hosted: bool = False  # the bucket is part of the host name instead of the path


class ClusterSettings(Section):
    """Settings of this host's part in a cluster of several hosts. A single machine needs none of these settings."""

    # The name of this host; empty: its host name.
    node: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9.-]{0,62})?$")] = ""
    join: Annotated[str, BeforeValidator(_join_with_commas)] = ""  # the managers: HOST[:PORT],… or etcd://…
    bind: AddressText = ""  # where this host's roles listen for other hosts; empty: `host`
    curve: bool = True  # encrypt messages between gateways and workers over TCP, and accept only known keys
    advertise: AddressText = ""  # the address that other hosts connect to; empty: where the roles listen
    # The name of the whole cluster, and facts about it such as its region, in search queries and in a directory.
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] = "local"
    metadata: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it

    @property
    def node_name(self) -> str:
        return self.node or re.sub(r"[^A-Za-z0-9.-]", "-", gethostname())[:63].strip("-.") or "node"


class AccessSettings(Section):
    keys: Literal["auto", "required", "off"] = "auto"  # auto: required once a key was created
    secret: SecretStr | None = None  # the cluster's, for digests of keys; null: generated and kept in the store
    limits_url: str = "memory://"  # each gateway enforces its share; or redis://host:port/0, counted together
    key_limits: KeyLimitSettings | None = None  # of each key that has no limits
    anonymous_limits: KeyLimitSettings | None = None  # of each client address if no keys are required

    @model_validator(mode="after")
    def _check_secret(self) -> "AccessSettings":
        if self.secret is not None and len(self.secret.get_secret_value()) < 16:
            raise ValueError("access.secret must have at least 16 characters that nobody can guess")
        return self


class TlsSettings(Section):
    """Settings of this host's certificate, for all ports that roles open and for connections between roles."""

    cert: str = ""  # PEM file, with intermediate certificates; empty: no TLS
    key: str = ""  # PEM file that only its owner can read
    ca: str = ""  # PEM file with the authorities of peers' certificates; empty: the system's
    client_auth: Literal["none", "optional", "required"] = "none"  # whether clients present a certificate
    principals: dict[str, tuple[Scope, ...]] = {}  # noqa: RUF012 - scopes by a certificate's name or a pattern

    @model_validator(mode="after")
    def _check_certificates(self) -> "TlsSettings":
        if bool(self.cert) != bool(self.key):
            raise ValueError("a certificate needs its key: set both tls.cert and tls.key")
        if self.client_auth != "none" and not (self.cert and self.ca):
            raise ValueError(
                "tls.client_auth needs tls.cert and tls.ca, the authority that signs clients' certificates"
            )
        if self.principals and self.client_auth == "none":
            raise ValueError("tls.principals needs tls.client_auth: without it clients present no certificate")
        return self


class GatewaySettings(Section):
    """Settings of a gateway's endpoints for clients."""

    grpc_server: Literal["auto", "native", "grpcio"] = "auto"  # auto: native if it supports the other settings


class HealthSettings(Section):
    """Settings of the health endpoints of a manager, a worker or a machine that joined a cluster."""

    host: str = "127.0.0.1"
    http_port: Port | None = None  # null: the role's usual port, or a free port if that is taken
    grpc_port: Port | None = None


class TriggerSettings(Section):
    """Settings of a trigger: a command or URL that is called for events."""

    on: Names = ("*",)  # kinds of events; * matches any letters
    command: tuple[str, ...] = ()  # a program and its arguments
    url: Annotated[str, Field(pattern=r"^(https?://[^/?#\s]+\S*)?$")] = ""
    secret: SecretStr | None = None  # signs the requests to the URL

    @property
    def name(self) -> str:
        return self.url.partition("?")[0] or self.command[0]

    @model_validator(mode="after")
    def _check_target(self) -> "TriggerSettings":
        if bool(self.url) == bool(self.command):
            raise ValueError("a trigger needs either a command or a url")
        if self.url and (self.secret is None or len(self.secret.get_secret_value()) < 16):
            raise ValueError("a trigger's url needs a secret of at least 16 characters, to sign its requests")
        return self


class TelemetrySettings(Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    otlp_endpoint: str = ""  # where traces are sent; empty: nothing is sent
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0


class Config(Section):
    models: Path = Path("models")
    watch: bool = False  # deploy models and versions that are added, changed or removed while the server runs
    data_dir: Path = Path("penstock-data")
    host: str = "127.0.0.1"
    insecure: bool = False  # allow other machines to reach the server without a key
    api_key: SecretStr | None = None  # that this machine's roles and commands send to other roles
    api_key_file: Path | None = None  # a file that contains the key
    allowed_hosts: Names = ()  # further host names that clients may use for the server
    allowed_origins: Names = ()  # origins of web pages that may call the server from browsers
    allow_shared_memory: bool = False  # let clients on this machine register shared memory regions
    http_port: Port = 8080
    grpc_port: Port = 50051
    gateways: Annotated[int, Field(ge=0, le=64)] = 1
    workers: Annotated[int, Field(ge=0, le=64)] = 1
    edge: Literal["auto", "envoy", "none"] = "auto"  # auto: Envoy beyond loopback, with keys or with TLS
    edge_sockets: Path | None = None  # folder of the gateways' unix sockets behind a proxy of your own; null: ports
    edge_http3: bool = False  # the edge also serves HTTP/3, at http_port over UDP
    edge_log: Literal["none", "refused", "all"] = "refused"  # requests of which the edge writes a line
    gateway: GatewaySettings = GatewaySettings()
    limits: Limits = Limits()
    data_plane: DataPlane = DataPlane()
    response_cache: CacheSettings = CacheSettings()
    sessions: SessionSettings = SessionSettings()
    quotas: QuotaSettings = QuotaSettings()
    search: SearchSettings = SearchSettings()
    async_requests: AsyncSettings = AsyncSettings()
    request_log: RequestLogSettings = RequestLogSettings()
    directory: DirectorySettings = DirectorySettings()
    worker: WorkerSettings = WorkerSettings()
    registry: RegistrySettings = RegistrySettings()
    s3: S3Settings = S3Settings()
    cluster: ClusterSettings = ClusterSettings()
    access: AccessSettings = AccessSettings()
    tls: TlsSettings = TlsSettings()
    health: HealthSettings = HealthSettings()
    triggers: tuple[TriggerSettings, ...] = ()  # commands and URLs that are called for events
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _can_serve_http3(self) -> "Config":
        if self.edge_http3 and (self.edge == "none" or not self.tls.cert or self.tls.client_auth != "none"):
            raise ValueError(
                "edge_http3 needs an edge and tls.cert, and no tls.client_auth: "
                "Envoy does not ask clients of HTTP/3 for certificates"
            )
        return self

    @property
    def is_local(self) -> bool:
        """True if only clients on this machine can reach the server."""
        return is_loopback(self.host)

    def check_reach(self, host: str = "") -> None:
        """Raise ConfigError if other machines reach `host` (default: the clients' host) and no key is required."""
        host = host or self.host
        if not is_loopback(host) and not self.insecure and not self.expects_keys:
            raise ConfigError(
                f"host '{host}' is open to other machines: anybody who reaches it could run, load and unload models. "
                "Require keys (--keys, setting access.keys: required; create them with `penstock key create`), or "
                "give --insecure (setting insecure) if the network keeps strangers out"
            )

    @property
    def expects_keys(self) -> bool:
        """True if clients need keys: a setting requires keys, or this role has a key, so that its cluster uses keys."""
        return self.access.keys == "required" or (self.access.keys == "auto" and self.own_key() != "")

    def find_key_requirement(self, host: str) -> Literal["auto", "required", "off"]:
        """Return the effective `access.keys` of an endpoint at `host`.

        `auto` becomes `required` if other machines reach the host (unless `insecure`) or if `tls.principals` is set.
        """
        is_open_to_others = not is_loopback(host) and not self.insecure
        is_required = is_open_to_others or bool(self.tls.principals)
        return "required" if self.access.keys == "auto" and is_required else self.access.keys

    def own_key(self) -> str:
        """Return the API key that this process sends to other roles; empty if this process has no key."""
        if self.api_key is not None:
            return self.api_key.get_secret_value().strip()
        if self.api_key_file is None:
            return ""
        try:
            return self.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.api_key_file}: the key cannot be read: {explain_cause(error)}") from error


class _Environment(Config, BaseSettings):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", env_nested_delimiter="__", extra="forbid")


def load_config(file: Path | None = None, **flags: Any) -> Config:
    """Return the configuration. Flags override environment variables, and environment variables override the file."""
    from_file = read_yaml(file, Config).model_dump(exclude_unset=True) if file else {}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        environment = _Environment().model_dump(exclude_unset=True)
        return Config.model_validate(merge_settings(merge_settings(from_file, environment), given))
    except ValidationError as error:
        first = error.errors()[0]
        parts = [part for part in map(str, first["loc"]) if not part.startswith(("constrained-", "literal["))]
        name = "__".join(parts).upper()  # without pydantic's own names for the members of a union
        if text := explain_removal(".".join(part for part in parts if not part.isdigit())):
            raise ConfigError(f"setting PENSTOCK_{name} or its flag: {text}") from error
        message = describe_problem(first)
        value = describe_given_value(first["loc"], first["input"])
        place = (
            f"setting PENSTOCK_{name} or its flag: " if name else ""
        )  # no name: several settings do not fit together
        raise ConfigError(f"{place}{message}{value and f', got {value}'}") from error


def with_absolute_paths(config: Config) -> Config:
    """Return the configuration with absolute paths, which are valid in every working directory."""
    paths = {"models": config.models.absolute(), "data_dir": config.data_dir.absolute()}
    tls = {name: str(Path(path).absolute()) for name in ("cert", "key", "ca") if (path := getattr(config.tls, name))}
    registry = {"cache_dir": str(Path(config.registry.cache_dir).absolute())} if config.registry.cache_dir else {}
    if config.registry.objects and "://" not in config.registry.objects:
        registry["objects"] = str(Path(config.registry.objects).absolute())
    if config.edge_sockets:
        paths["edge_sockets"] = config.edge_sockets.absolute()
    found = config.directory
    directory: dict[str, object] = {"key_file": found.key_file.absolute()} if found.key_file else {}
    directory |= {"ca": str(Path(found.ca).absolute())} if found.ca else {}
    if config.api_key_file:
        paths["api_key_file"] = config.api_key_file.absolute()
    sections = {
        "tls": config.tls.model_copy(update=tls),
        "registry": config.registry.model_copy(update=registry),
        "directory": found.model_copy(update=directory),
    }
    return config.model_copy(update=paths | sections)


def is_color_allowed() -> bool:
    """Return False if the user turned colours off with NO_COLOR (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def is_output_width_set() -> bool:
    """Return True if COLUMNS sets the width of the output."""
    return os.environ.get("COLUMNS", "").isdigit()


def find_user_config_folder() -> Path:
    """Return the folder for the settings of this user's commands."""
    given = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".config") / "penstock"


def read_environment_key() -> SecretStr | None:
    """Return the value of PENSTOCK_API_KEY, which is never written to a file."""
    return _Environment().api_key
