"""model.yaml: what all read of it, and the options that each task and engine owns."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from penstock.core.plugins import ENGINES, TASKS, check_name
from penstock.core.settings import GENERATE, BlockSettings, Instances, SharedSettings
from penstock.core.yaml_file import Misfit
from penstock.engines.options import GenaiOptions, PythonOptions, TensorRtOptions, TorchOptions
from penstock.tasks.options import (
    ClassifyOptions,
    EmbedOptions,
    GenerateOptions,
    ScoreOptions,
    TextOptions,
    UpscaleOptions,
)
from penstock.telemetry.control_groups import usable_cores

DEFAULT_FILES = {"python": "model.py", "torch": "model.pt", "genai": "model.gguf"}  # by engine; else model.onnx
AUTO = "auto"  # the engine that is best for the model on the processor that runs it
NETWORK_ENGINES = ("onnx", "openvino", "tensorrt", AUTO)  # their models are files that others can read, too
INSTANCES_ON_A_GPU = 2  # one computes while the other's batch is joined, copied and launched
# For texts, where model.yaml does not say: a batch of its own costs there as much as some thousand tokens.
TEXTS_ON_A_GPU: dict[str, Any] = {"max_rows": 1024, "max_tokens": 65_536, "max_padding": 0.1, "free_padding": 2048}


class ModelSettings(SharedSettings):
    engine: str = "onnx"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    # What `engine: auto` must keep of FP32's answers, as `penstock model quantize --min-accuracy`; None: as that does.
    min_accuracy: Annotated[float, Field(ge=0, le=100)] | None = None
    versions: Literal["latest", "all"] | tuple[Annotated[int, Field(ge=1)], ...] = "latest"
    warm_up: bool = True
    # Where requests are prepared and answers finished; auto: in a pool on a GPU, inline on a CPU
    placement: Literal["auto", "inline", "pool", "worker"] = "auto"
    embed: EmbedOptions = EmbedOptions()
    score: ScoreOptions = ScoreOptions()
    classify: ClassifyOptions = ClassifyOptions()
    upscale: UpscaleOptions = UpscaleOptions()
    generate: GenerateOptions = GenerateOptions()
    python: PythonOptions = PythonOptions()
    torch: TorchOptions = TorchOptions()
    tensorrt: TensorRtOptions = TensorRtOptions()
    genai: GenaiOptions = GenaiOptions()
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it; of a task or an engine that another package brings

    def instance_count(self, device: str = "cpu") -> int:
        """`device` is the one that runs the model: what `auto` became."""
        if self.instances.count != "auto":
            return self.instances.count
        if self.sessions.is_stateful:
            return 1  # the requests of a session must not overtake each other
        if self.task == GENERATE:
            return 1  # which runs many at once
        if device != "cpu":
            return INSTANCES_ON_A_GPU
        return max(1, usable_cores() // self.instances.threads)

    def on_device(self, device: str, has_texts: bool) -> "ModelSettings":
        """With that device's defaults for what model.yaml does not say."""
        if not (has_texts and device.startswith("cuda")):
            return self
        given = self.batching.model_fields_set
        missing = {name: value for name, value in TEXTS_ON_A_GPU.items() if name not in given}
        return self.model_copy(update={"batching": self.batching.model_copy(update=missing)})

    @property
    def max_length(self) -> int:
        """Tokens of a row, of a task of texts."""
        options = getattr(self, self.task, None)
        return options.max_length if isinstance(options, TextOptions) else 0

    def for_block(self) -> BlockSettings:
        """What a block's gateways are told of them."""
        shared = {name: getattr(self, name) for name in SharedSettings.model_fields}
        if self.task == GENERATE:
            shared["batching"] = self.batching.model_copy(update={"max_rows": self.generate.max_running})
        return BlockSettings(**shared, is_decoupled=self.python.is_decoupled)

    @model_validator(mode="before")
    @classmethod
    def _names_the_file(cls, given: Any) -> Any:
        if isinstance(given, dict) and "file" not in given and given.get("engine") in DEFAULT_FILES:
            return {**given, "file": DEFAULT_FILES[given["engine"]]}
        return given

    @model_validator(mode="before")
    @classmethod
    def _names_the_device(cls, given: Any) -> Any:
        """An engine that runs nowhere else need not be told."""
        if not isinstance(given, dict) or given.get("engine") != "tensorrt":
            return given
        asked = given.get("instances", {})
        if isinstance(asked, Instances):
            asked = asked.model_dump(exclude_unset=True)
        return {**given, "instances": {"device": "cuda", **asked}} if isinstance(asked, dict) else given

    @field_validator("task", "engine")
    @classmethod
    def _check_name(cls, name: str, field: ValidationInfo) -> str:
        return check_name(TASKS if field.field_name == "task" else ENGINES, name)

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelSettings":
        if self.engine == "onnx" and self.precision == "bf16":
            message = "precision bf16 needs engine: openvino (ONNX Runtime has no BF16 kernels on CPU)"
            raise Misfit(message, "precision", "engine")
        if self.engine == "tensorrt" and self.precision == "bf16":
            message = "precision bf16 is a file's own with engine: tensorrt; use precision: auto"
            raise Misfit(message, "precision", "engine")
        if self.precision == "fp16" and self.engine in NETWORK_ENGINES:
            raise Misfit(
                "precision fp16 is a file's own here: penstock model quantize --precision fp16 makes one "
                "(engine: torch converts as it loads)",
                "precision",
                "engine",
            )
        if self.engine in ("openvino", "genai") and self.instances.device not in ("auto", "cpu"):
            message = (
                f"instances.device {self.instances.device} needs engine: onnx or torch (OpenVINO serves on the CPU)"
            )
            raise Misfit(message, "instances.device", "engine")
        if self.engine == "tensorrt" and self.instances.device in ("cpu", "mps"):
            message = f"engine: tensorrt needs instances.device cuda, and it is {self.instances.device}"
            raise Misfit(message, "instances.device", "engine")
        if self.engine == "genai" and self.task != "generate":
            raise Misfit("engine: genai needs task: generate", "engine", "task")
        if self.engine == "python" and self.task != "tensor":
            raise Misfit("engine: python needs task: tensor", "engine", "task")
        if self.engine == "python" and not (self.python.inputs and self.python.outputs):
            message = "engine: python needs python.inputs and python.outputs: a Python file does not tell them"
            raise Misfit(message, "engine", "python.inputs", "python.outputs", "python", reason="python_tensors")
        if self.python.is_decoupled and self.engine != "python":
            raise Misfit("python.is_decoupled needs engine: python", "python.is_decoupled", "engine")
        if self.task == GENERATE and self.engine in (*NETWORK_ENGINES, "torch", "python"):
            raise Misfit("task: generate needs engine: genai", "task", "engine")
        if self.task == GENERATE and self.instances.count not in ("auto", 1):
            message = (
                "task: generate needs instances.count: 1 (it runs generate.max_running at once; add workers for more)"
            )
            raise Misfit(message, "task", "instances.count")
        if self.sessions.is_stateful and self.instances.count not in ("auto", 1):
            message = "sessions.is_stateful needs instances.count: 1 (more workers share the sessions)"
            raise Misfit(message, "sessions.is_stateful", "instances.count")
        if self.upscale.overlap * 2 >= self.upscale.tile:
            raise Misfit("upscale.overlap must be less than half of upscale.tile", "upscale.overlap", "upscale.tile")
        return self
