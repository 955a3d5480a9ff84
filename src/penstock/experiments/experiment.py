"""The settings of an experiment, and the cases that follow from the settings."""

import hashlib
import json
from collections.abc import Callable, Mapping
from itertools import product
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from penstock.core.config import DataPlane, Limits, Port
from penstock.core.errors import ConfigError
from penstock.core.settings import Batching, Section

T = TypeVar("T")
Axis = Annotated[tuple[T, ...], Field(min_length=1)]
Engine = Annotated[
    Literal["onnx", "openvino", "torch", "tensorrt", "genai"], BeforeValidator(lambda given: _normalize_engine(given))
]
Precision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Device = Literal["cpu", "cuda", "mps"]
Protocol = Literal["grpc", "stream", "rest"]
Data = Literal["auto", "mixed", "queries", "passages", "pairs", "photos", "noop", "prompts"]
TokenCounts = Annotated[str, BeforeValidator(lambda given: str(given) if isinstance(given, int) else given)]
PrefixTokens = Annotated[int, Field(ge=0, le=100_000)]
Bound = Annotated[float, Field(gt=0)]  # milliseconds
Count = Annotated[int, Field(ge=1, le=4096)]
Instances = Annotated[int, Field(ge=1, le=1024)] | Literal["auto"]
Threads = Annotated[int, Field(ge=1, le=1024)]
Rate = Annotated[float, Field(gt=0, le=1_000_000)]

ALIASES = {
    "sentence-transformers/all-MiniLM-L6-v2": "minilm",
    "all-MiniLM-L6-v2": "minilm",
}
PROMPTS = "prompts"
UNITS = {"pairs": "pairs", "photos": "images", "noop": "rows", PROMPTS: "tokens"}  # all other data are texts
MAX_CASES = 2000


def _normalize_engine(engine: Any) -> Any:
    """Return the engine's name; accept `pytorch`, which other servers use, for the engine torch."""
    return "torch" if engine == "pytorch" else engine


class ModelPart(Section):
    """The model and its settings. Omitted settings come from the model's model.yaml; omitted `precision` is FP32."""

    name: str = "minilm"
    engine: Annotated[Engine | None, Field(validation_alias=AliasChoices("engine", "backend"))] = None
    precision: Precision | None = None
    quantized: bool = False  # INT8 on a CPU, FP16 on CUDA and MPS
    device: Device = "cpu"
    instances: Instances | None = None
    threads: Threads | None = None

    @model_validator(mode="after")
    def _check_precision(self) -> "ModelPart":
        if self.quantized and self.precision not in (None, "int8", "fp16"):
            raise ValueError(f"quantized: true contradicts precision: {self.precision}")
        return self


class ServerPart(Section):
    host: str = "127.0.0.1"
    grpc_port: Annotated[Port, Field(validation_alias=AliasChoices("grpc_port", "port"))] = 0  # 0: any free port
    http_port: Port = 0
    gateways: Annotated[int, Field(ge=1, le=64)] = 1
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    limits: Limits = Limits()
    data_plane: DataPlane = DataPlane()


class BatchingPart(Batching):
    max_rows: Annotated[int, Field(ge=1, le=65536, validation_alias=AliasChoices("max_rows", "max_batch_size"))] = 32


class ExperimentPart(Section):
    batch_sizes: Axis[Count] = (1,)  # items per request
    concurrency_levels: Axis[Count] = (1, 8, 32)
    request_rates: Axis[Rate] | None = None  # requests per second in an open loop, instead of callers
    benchmark_requests: Annotated[int, Field(ge=1)] | None = None  # None: measure until three windows agree
    protocol: Protocol = "grpc"
    data: Data = "auto"  # auto: data that fit the model's task
    # For models that generate text:
    prompt_tokens: TokenCounts = "128"  # in the forms of `penstock bench`
    output_tokens: TokenCounts = ""
    prefix_tokens: PrefixTokens = 0
    stream: bool = True  # False: each answer is one response
    goodput: dict[Literal["ttft", "tpot", "e2el"], Bound] = Field(default_factory=dict)
    repeats: Annotated[int, Field(ge=1, le=100)] = 3
    warm_up_s: Annotated[float, Field(ge=0, le=600)] = 2.0
    window_s: Annotated[float, Field(ge=0.1, le=600)] = 3.0
    most_windows: Annotated[int, Field(ge=3, le=1000)] = 8
    generators: Annotated[int, Field(ge=1, le=64)] = 1  # processes of the load generator

    @property
    def bounds(self) -> dict[str, float]:
        return {str(name): bound for name, bound in self.goodput.items()}


class MatrixPart(Section):
    """Axes whose combinations become cases. An entry of `exclude` removes the combinations that match all its keys."""

    model: Axis[str] | None = None
    engine: Annotated[Axis[Engine] | None, Field(validation_alias=AliasChoices("engine", "backend"))] = None
    precision: Axis[Precision] | None = None
    quantized: Axis[bool] | None = None
    device: Axis[Device] | None = None
    instances: Axis[Instances] | None = None
    threads: Axis[Threads] | None = None
    gateways: Axis[Count] | None = None
    workers: Axis[Count] | None = None
    max_rows: Axis[int] | None = None
    max_tokens: Axis[int | None] | None = None
    max_delay_ms: Axis[float] | None = None
    order: Axis[Literal["length", "arrival"]] | None = None
    protocol: Axis[Protocol] | None = None
    data: Axis[Data] | None = None
    prompt_tokens: Axis[TokenCounts] | None = None
    output_tokens: Axis[TokenCounts] | None = None
    prefix_tokens: Axis[PrefixTokens] | None = None
    stream: Axis[bool] | None = None
    batch_size: Axis[Count] | None = None
    concurrency: Axis[Count] | None = None
    rate: Axis[Rate] | None = None
    exclude: tuple[dict[str, Any], ...] = ()

    @model_validator(mode="after")
    def _check_exclude_keys(self) -> "MatrixPart":
        known = set(MatrixPart.model_fields) - {"exclude"}
        for entry in self.exclude:
            if unknown := sorted(set(entry) - known):
                raise ValueError(f"exclude: unknown key '{unknown[0]}'; known keys: {', '.join(sorted(known))}")
        return self

    def axes(self) -> dict[str, tuple[Any, ...]]:
        given = {name: getattr(self, name) for name in MatrixPart.model_fields if name != "exclude"}
        return {name: values for name, values in given.items() if values is not None}

    def excludes(self, combination: Mapping[str, Any]) -> bool:
        def matches(entry: Mapping[str, Any]) -> bool:
            return all(
                combination.get(key) in map(_normalize_engine, value if isinstance(value, list) else [value])
                for key, value in entry.items()
            )

        return any(matches(entry) for entry in self.exclude if entry)


class Experiment(Section):
    name: str = ""
    description: str = ""
    extends: str | None = None
    model: ModelPart = ModelPart()
    server: ServerPart = ServerPart()
    batching: BatchingPart = BatchingPart()
    experiment: ExperimentPart = ExperimentPart()
    matrix: MatrixPart = MatrixPart()

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the results, with inheritance resolved."""
        found = self.model_dump(mode="json", exclude={"name", "description", "extends"})
        found["batching"] = self.batching.model_dump(mode="json", exclude_unset=True)
        found["experiment"].pop("repeats")  # more repeats continue existing results
        for name in LATER_KEYS:  # omit defaults of newer keys, so that older results keep the same hash
            if found["experiment"][name] == ExperimentPart.model_fields[name].get_default(call_default_factory=True):
                del found["experiment"][name]
        return found


class Case(Section):
    """One load on one server configuration. A field that is None means the value in the model's model.yaml."""

    id: str
    variant: str  # the id without the load; a variant is one line in a plot
    model: str
    engine: str
    precision: str
    device: str
    instances: int | str | None
    threads: int | None
    batching: dict[str, Any]
    server: dict[str, Any]
    protocol: str
    data: str
    batch_size: int
    concurrency: int  # 0 in an open loop
    rate: float = 0.0  # requests per second in an open loop
    prompt_tokens: str = ""  # only for models that generate text, as the next three fields
    output_tokens: str = ""
    prefix_tokens: int = 0
    stream: bool = True

    @property
    def load_id(self) -> str:
        return f"b{self.batch_size} {_format_pressure(self.concurrency, self.rate)}"

    @property
    def pressure(self) -> float:
        """The load: the number of callers, or the requests per second in an open loop."""
        return self.rate or self.concurrency

    @property
    def is_text(self) -> bool:
        return self.data == PROMPTS

    @property
    def unit(self) -> str:
        return UNITS.get(self.data, "texts")

    @property
    def server_id(self) -> str:
        """The id of the server configuration. Cases with the same server id are measured on the same server."""
        keys = {"model", "engine", "precision", "device", "instances", "threads", "batching", "server"}
        return digest(self.model_dump(include=keys))


def _format_pressure(concurrency: int, rate: float) -> str:
    return f"r{rate:g}" if rate else f"c{concurrency}"


def digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SHAPE_KEYS = ("prompt_tokens", "output_tokens", "prefix_tokens", "stream")
LATER_KEYS = (*SHAPE_KEYS, "goodput", "request_rates")

# The section and key that each axis of a matrix sets. Axes of the load are fields of the case.
_SETTING_OF_AXIS = {
    "model": ("model", "name"),
    **{key: ("model", key) for key in ("engine", "precision", "quantized", "device", "instances", "threads")},
    **{key: ("server", key) for key in ("gateways", "workers")},
    **{key: ("batching", key) for key in ("max_rows", "max_tokens", "max_delay_ms", "order")},
    **{key: ("experiment", key) for key in ("protocol", "data", *SHAPE_KEYS)},
}
# Axes whose values are in every case id without the axis's name.
_UNNAMED_AXES = {"model", "engine", "precision", "quantized", "device", "batch_size", "concurrency", "rate"}


def expand(
    experiment: Experiment, engine_of: Callable[[str], str], data_of: Callable[[str], str] = lambda model: "pairs"
) -> list[Case]:
    """Return the cases of an experiment.

    `engine_of` returns a model's engine, and `data_of` the kind of data that fits a model.
    """
    axes = _list_axes(experiment)
    # The axes of the load vary fastest, so that cases with the same server are adjacent.
    order = sorted(axes, key=lambda name: list(MatrixPart.model_fields).index(name))
    combinations = [dict(zip(order, values, strict=True)) for values in product(*(axes[name] for name in order))]
    cases: dict[str, Case] = {}
    for combination in combinations:
        if len(cases) > MAX_CASES:
            raise ConfigError(f"{experiment.name}: more than {MAX_CASES} cases; remove values from its matrix")
        case = _make_case(experiment, combination, engine_of, data_of)
        # `exclude` is compared with the resolved case, so that it can match default values.
        facts = case.model_dump(include=MatrixPart.model_fields.keys() & Case.model_fields.keys())
        if not experiment.matrix.excludes({**case.batching, **case.server, **facts, **combination}):
            cases.setdefault(case.id, case)
    if not cases:
        raise ConfigError(f"{experiment.name}: matrix.exclude excludes every case")
    return list(cases.values())


def _list_axes(experiment: Experiment) -> dict[str, tuple[Any, ...]]:
    part, matrix = experiment.experiment, experiment.matrix.axes()
    rates = matrix.get("rate", part.request_rates)
    if rates is None:
        return {"batch_size": part.batch_sizes, "concurrency": part.concurrency_levels, **matrix}
    if "concurrency" in matrix:
        raise ConfigError(
            f"{experiment.name}: concurrency (closed loop) and rates (open loop) exclude each other: set one of them"
        )
    return {"batch_size": part.batch_sizes, **matrix, "rate": rates}


def _make_case(
    experiment: Experiment,
    combination: Mapping[str, Any],
    engine_of: Callable[[str], str],
    data_of: Callable[[str], str],
) -> Case:
    parts = _build_sections(experiment, combination)
    settings = parts["model"]
    model = ALIASES.get(settings["name"], settings["name"])
    quantized = "int8" if settings["device"] == "cpu" else "fp16"  # the usual choice for the device
    own = settings["engine"] or engine_of(model)
    # The precision of a model that generates text is that of its file.
    default = "auto" if own == "genai" else "fp32"
    precision = settings["precision"] or (quantized if settings["quantized"] else default)
    is_converted = precision in ("int8", "fp16") or settings["device"] != "cpu"
    engine = settings["engine"] or ("onnx" if is_converted and own == "openvino" else own)
    given = parts["experiment"]["data"]
    data = data_of(model) if given == "auto" else given
    shape = {key: parts["experiment"][key] for key in SHAPE_KEYS} if data == PROMPTS else {}
    named = [
        f"{key}={'none' if value is None else value}" for key, value in combination.items() if key not in _UNNAMED_AXES
    ]
    variant = " ".join([model, engine, precision, settings["device"], *named])
    batch_size, concurrency = combination["batch_size"], combination.get("concurrency", 0)
    rate = combination.get("rate", 0.0)
    return Case(
        id=f"{variant} b{batch_size} {_format_pressure(concurrency, rate)}".replace(" ", "-"),
        variant=variant,
        model=model,
        engine=engine,
        precision=precision,
        device=settings["device"],
        instances=settings["instances"],
        threads=settings["threads"],
        batching=parts["batching"],
        server=parts["server"],
        protocol=parts["experiment"]["protocol"],
        data=data,
        batch_size=batch_size,
        concurrency=concurrency,
        rate=rate,
        **shape,
    )


def _build_sections(experiment: Experiment, combination: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the experiment's sections with the values of one combination of its matrix."""
    parts: dict[str, dict[str, Any]] = {
        "model": experiment.model.model_dump(),
        "server": experiment.server.model_dump(mode="json"),
        "batching": experiment.batching.model_dump(exclude_unset=True),
        "experiment": experiment.experiment.model_dump(include={"protocol", "data", *SHAPE_KEYS}),
    }
    for key, value in combination.items():
        if key in _SETTING_OF_AXIS:
            section, name = _SETTING_OF_AXIS[key]
            parts[section][name] = value
    return parts
