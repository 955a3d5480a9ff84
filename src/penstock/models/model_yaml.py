"""The settings in model.yaml: keys that all roles read, and the sections of tasks and engines."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from penstock.core.plugins import ENGINES, check_name
from penstock.core.settings import BatchingOnGpu, BlockSettings, Instances, SharedSettings
from penstock.core.yaml_file import ConflictingValues
from penstock.engines.engine_options import GenaiOptions, PythonOptions, TensorRtOptions, TorchOptions
from penstock.tasks.built_in import TASKS, describe_task, tasks_for_engine
from penstock.tasks.options import TaskSettings
from penstock.telemetry.control_groups import count_usable_cores

DEFAULT_FILES = {"python": "model.py", "torch": "model.pt", "genai": "model.gguf"}  # by engine; default: model.onnx
AUTO = "auto"  # use the fastest engine for the model on this processor
NETWORK_ENGINES = ("onnx", "openvino", "tensorrt", AUTO)  # engines that read each other's files
INSTANCES_ON_A_GPU = 2  # one instance computes while the other's batch is joined and copied
# Defaults for texts on a GPU, where starting a batch costs as much time as some thousand tokens.
TEXTS_ON_A_GPU: dict[str, Any] = {"max_rows": 1024, "max_tokens": 65_536}


class ModelSettings(TaskSettings):
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    # The accuracy that `engine: auto` must keep, compared with FP32 (see `penstock model quantize --min-accuracy`);
    # None: the task's default floor.
    min_accuracy: Annotated[float, Field(ge=0, le=100)] | None = None
    versions: Literal["latest", "all"] | tuple[Annotated[int, Field(ge=1)], ...] = "latest"
    warm_up: bool = True
    # Where requests are prepared and answers finished; auto: in a pool on a GPU, inline on a CPU
    placement: Literal["auto", "inline", "pool"] = "auto"
    python: PythonOptions = PythonOptions()
    torch: TorchOptions = TorchOptions()
    tensorrt: TensorRtOptions = TensorRtOptions()
    genai: GenaiOptions = GenaiOptions()

    def instance_count(self, device: str = "cpu") -> int:
        """Return the number of instances to run on `device`, which is a specific device and not `auto`."""
        if self.instances.count != "auto":
            return self.instances.count
        if self.sessions.is_stateful:
            return 1  # so that the requests of a session run in order
        if describe_task(self.task).max_running:
            return 1  # because one instance runs many requests at once
        if device != "cpu":
            return INSTANCES_ON_A_GPU
        return max(1, count_usable_cores() // self.instances.threads)

    def on_device(self, device: str, has_texts: bool) -> "ModelSettings":
        """Return the settings, with defaults for this device in place of keys that model.yaml leaves out."""
        if not (has_texts and device.startswith("cuda")):
            return self
        batching = BatchingOnGpu(**(TEXTS_ON_A_GPU | self.batching.model_dump(exclude_unset=True)))
        return self.model_copy(update={"batching": batching})

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens in a row, or 0 if the task does not take texts."""
        return self.text_options.max_length if self.text_options else 0

    def for_block(self) -> BlockSettings:
        """Return the part of the settings that gateways need."""
        shared = {name: getattr(self, name) for name in SharedSettings.model_fields}
        if max_running := describe_task(self.task).max_running:
            shared["batching"] = self.batching.model_copy(update={"max_rows": max_running(self)})
        return BlockSettings(**shared, is_decoupled=self.python.is_decoupled, takes_packets=self.python.takes_packets)

    @model_validator(mode="before")
    @classmethod
    def _set_default_file(cls, values: Any) -> Any:
        if isinstance(values, dict) and "file" not in values and values.get("engine") in DEFAULT_FILES:
            return {**values, "file": DEFAULT_FILES[values["engine"]]}
        return values

    @model_validator(mode="before")
    @classmethod
    def _set_default_device(cls, values: Any) -> Any:
        """Set `instances.device` to cuda for `engine: tensorrt`, unless the settings name a device."""
        if not isinstance(values, dict) or values.get("engine") != "tensorrt":
            return values
        asked = values.get("instances", {})
        if isinstance(asked, Instances):
            asked = asked.model_dump(exclude_unset=True)
        return {**values, "instances": {"device": "cuda", **asked}} if isinstance(asked, dict) else values

    @field_validator("task", "engine")
    @classmethod
    def _check_name(cls, name: str, field: ValidationInfo) -> str:
        return check_name(TASKS if field.field_name == "task" else ENGINES, name)

    @model_validator(mode="after")
    def _check_combinations(self) -> "ModelSettings":
        if self.engine == "onnx" and self.precision == "bf16":
            message = "precision bf16 needs engine: openvino (ONNX Runtime has no BF16 kernels on CPU)"
            raise ConflictingValues(message, "precision", "engine")
        if self.engine == "tensorrt" and self.precision == "bf16":
            message = "engine: tensorrt takes bf16 from the model's file; use precision: auto"
            raise ConflictingValues(message, "precision", "engine")
        if self.precision == "fp16" and self.engine in NETWORK_ENGINES:
            raise ConflictingValues(
                f"engine: {self.engine} needs a file in fp16: create one with penstock model quantize --precision fp16 "
                "and use precision: auto (only engine: torch converts while it loads)",
                "precision",
                "engine",
            )
        if self.engine in ("openvino", "genai") and self.instances.device not in ("auto", "cpu"):
            message = f"instances.device {self.instances.device} needs engine: onnx or torch (OpenVINO runs on the CPU)"
            raise ConflictingValues(message, "instances.device", "engine")
        if self.engine == "tensorrt" and self.instances.device in ("cpu", "mps"):
            message = f"engine: tensorrt needs instances.device cuda, but it is {self.instances.device}"
            raise ConflictingValues(message, "instances.device", "engine")
        self._check_task()
        if self.engine == "python" and not (self.python.inputs and self.python.outputs):
            message = "engine: python needs python.inputs and python.outputs: they cannot be read from a Python file"
            raise ConflictingValues(
                message, "engine", "python.inputs", "python.outputs", "python", reason="python_tensors"
            )
        if self.python.is_decoupled and self.engine != "python":
            raise ConflictingValues("python.is_decoupled needs engine: python", "python.is_decoupled", "engine")
        if self.sessions.is_stateful and self.instances.count not in ("auto", 1):
            message = (
                "sessions.is_stateful needs instances.count: 1 (to run more, add workers, which share the sessions)"
            )
            raise ConflictingValues(message, "sessions.is_stateful", "instances.count")
        return self

    def _check_task(self) -> None:
        """Raise ConflictingValues if the engine cannot run the task, or the task cannot run in several instances."""
        task = describe_task(self.task)
        if self.engine in ENGINES.built_in and self.engine not in task.engines:
            tasks = tasks_for_engine(self.engine)
            if len(tasks) == 1:
                raise ConflictingValues(f"engine: {self.engine} needs task: {tasks[0]}", "engine", "task")
            raise ConflictingValues(f"task: {self.task} needs engine: {' or '.join(task.engines)}", "task", "engine")
        if task.max_running and self.instances.count not in ("auto", 1):
            message = (
                f"task: {self.task} needs instances.count: 1 "
                f"(one instance runs {self.task}.max_running requests at once; add workers for more)"
            )
            raise ConflictingValues(message, "task", "instances.count")
