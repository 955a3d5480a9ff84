"""A model's own class, as its process holds it: loaded from its file, and its answers checked."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, cast

import numpy as np

from penstock.core.error_text import tail
from penstock.core.errors import EngineFailed, InvalidTensor
from penstock.core.requests import Parameter
from penstock.core.tensors import Tensor, TensorSpec, fits, from_array

MAX_SUMMARY_CHARS = 300
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # a larger one would keep a gateway from all else for too long


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What a model's constructor may know."""

    model: str
    version: str
    folder: Path  # the version's: where model.py is
    instance: int
    threads: int
    device: str  # instances.device, as model.yaml has it


@dataclass(slots=True)
class RequestContext:
    """What a model may know of a request beside its tensors."""

    request_id: str
    parameters: dict[str, Parameter]
    session_id: str  # empty: none
    seq_no: int
    is_start: bool
    is_end: bool
    session: dict[Any, Any] = field(default_factory=dict)  # the model's own, until the session ends


def load_model(file: Path, class_name: str, is_decoupled: bool, context: ModelContext) -> Any:
    """The model, constructed. Raises EngineFailed with what it lacks, or whatever it raises itself."""
    module = _import(file)
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise EngineFailed(f"it has no class {class_name}; python.class_name says which class the model is")
    model = found(context) if _takes(found, context) else found()
    infer = getattr(model, "infer", None)
    if not callable(infer) or not _takes(infer, {}, context) or inspect.iscoroutinefunction(infer):
        raise EngineFailed(f"its class {class_name} needs a method infer(self, inputs, context), which is not async")
    if inspect.isgeneratorfunction(infer) and not is_decoupled:
        raise EngineFailed(f"{class_name}.infer is a generator; that needs python.is_decoupled: true")
    return model


def _import(file: Path) -> ModuleType:
    # By its own name, so that what it defines can be found again, but not in the place of a module that is there.
    name = file.stem if file.stem not in sys.modules else f"{file.stem}_model"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise EngineFailed("it is not Python source: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


def _takes(function: Any, *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def answers_of(given: object) -> Iterator[object]:
    """What a decoupled model's `infer` gave, one answer after another."""
    if isinstance(given, Mapping):
        return iter((given,))
    try:
        return iter(cast("Iterable[object]", given))
    except TypeError:
        raise _mismatch(
            f"infer gave a {type(given).__name__}; a decoupled model yields dicts of NumPy arrays by output name"
        ) from None


def to_tensors(answer: object, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The answer's arrays in the order of the specs. Raises EngineFailed, which says what is wrong with them."""
    if not isinstance(answer, Mapping):
        raise _mismatch(f"infer gave a {type(answer).__name__}; it must give a dict of NumPy arrays by output name")
    names = [spec.name for spec in specs]
    if unknown := [str(name) for name in answer if name not in names]:
        raise _mismatch(f"infer gave an output '{unknown[0]}'; python.outputs has {', '.join(names)}")
    if missing := [name for name in names if name not in answer]:
        raise _mismatch(f"infer gave no output '{missing[0]}'; python.outputs has {', '.join(names)}")
    tensors = [_to_tensor(spec, answer[spec.name]) for spec in specs]
    size = sum(len(tensor.data) for tensor in tensors)
    if size > MAX_ANSWER_BYTES:
        raise _mismatch(
            f"infer gave {size} bytes; an answer may have {MAX_ANSWER_BYTES}: give it in parts (python.is_decoupled)"
        )
    return tensors


def _to_tensor(spec: TensorSpec, array: object) -> Tensor:
    if not isinstance(array, np.ndarray):
        raise _mismatch(f"output '{spec.name}' is a {type(array).__name__}; it must be a NumPy array")
    try:
        tensor = from_array(spec.name, array)
    except InvalidTensor:
        raise _mismatch(f"output '{spec.name}' has dtype {array.dtype}; python.outputs says {spec.datatype}") from None
    except (AttributeError, TypeError):
        raise _mismatch(f"output '{spec.name}' has an element that is neither bytes nor str") from None
    if tensor.datatype != spec.datatype:
        raise _mismatch(f"output '{spec.name}' is {tensor.datatype}; python.outputs says {spec.datatype}")
    if not fits(tensor.shape, spec.shape):
        raise _mismatch(f"output '{spec.name}' has shape {list(tensor.shape)}; python.outputs says {list(spec.shape)}")
    return tensor


def describe(error: BaseException, ours: Sequence[str]) -> str:
    """What was raised, and the end of its traceback without the frames of our own files that led there."""
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith((*ours, "<frozen importlib")):
        at = at.tb_next
    summary = traceback.format_exception_only(error)[-1].strip()[:MAX_SUMMARY_CHARS]
    return f"{summary}\n{tail(''.join(traceback.format_exception(type(error), error, at)))}"


def _mismatch(text: str) -> EngineFailed:
    return EngineFailed(text, reason="output_mismatch")
