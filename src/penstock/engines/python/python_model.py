"""Loads a Python model's class from its file, and checks the model's answers. Runs in the model's process."""

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

from penstock.core.error_text import cut_to_last_lines
from penstock.core.errors import EngineFailed, InvalidTensor
from penstock.core.requests import Parameter
from penstock.core.tensors import Tensor, TensorSpec, from_array, is_shape_accepted

CLASS = "Model"  # in model.py
MAX_SUMMARY_CHARS = 300
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # a larger answer would block a gateway for too long


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The data that a model's constructor receives."""

    model: str
    version: str
    folder: Path  # the version's folder, with model.py
    instance: int
    threads: int
    device: str  # instances.device as set in model.yaml


@dataclass(slots=True)
class RequestContext:
    """The data of a request, besides its tensors, that a model receives."""

    request_id: str
    parameters: dict[str, Parameter]
    session_id: str  # empty: no session
    seq_no: int
    is_start: bool
    is_end: bool
    session: dict[Any, Any] = field(default_factory=dict)  # the model's own data, kept until the session ends


def load_model(file: Path, is_decoupled: bool, context: ModelContext) -> Any:
    """Construct the model; raise EngineFailed if its class is unsuitable, or the error that its constructor raises."""
    module = _import_file(file)
    found = getattr(module, CLASS, None)
    if not isinstance(found, type):
        raise EngineFailed(f"the file has no class {CLASS}: rename the model's class, or add '{CLASS} = ITS_NAME'")
    model = found(context) if _accepts_arguments(found, context) else found()
    infer = getattr(model, "infer", None)
    if not callable(infer) or not _accepts_arguments(infer, {}, context) or inspect.iscoroutinefunction(infer):
        raise EngineFailed(f"the class {CLASS} needs a method infer(self, inputs, context) that is not async")
    if inspect.isgeneratorfunction(infer) and not is_decoupled:
        raise EngineFailed(f"{CLASS}.infer is a generator: set python.is_decoupled: true")
    return model


def _import_file(file: Path) -> ModuleType:
    # The module has the file's name, so that its classes can be found, unless a module of that name exists.
    name = file.stem if file.stem not in sys.modules else f"{file.stem}_model"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise EngineFailed(f"'{file.name}' is not a Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


def _accepts_arguments(function: Any, *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def iterate_answers(returned: object) -> Iterator[object]:
    """Return an iterator over the answers that a decoupled model's `infer` returned."""
    if isinstance(returned, Mapping):
        return iter((returned,))
    try:
        return iter(cast("Iterable[object]", returned))
    except TypeError:
        raise _mismatch_error(
            f"infer returned a {type(returned).__name__}; a decoupled model yields dicts of NumPy arrays by output name"
        ) from None


def to_tensors(answer: object, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return the answer's arrays in the order of the specs; raise EngineFailed if the answer does not match them."""
    if not isinstance(answer, Mapping):
        raise _mismatch_error(
            f"infer returned a {type(answer).__name__}; it must return a dict of NumPy arrays by output name"
        )
    names = [spec.name for spec in specs]
    if unknown := [str(name) for name in answer if name not in names]:
        raise _mismatch_error(f"infer returned an output '{unknown[0]}'; python.outputs has {', '.join(names)}")
    if missing := [name for name in names if name not in answer]:
        raise _mismatch_error(f"infer returned no output '{missing[0]}'; python.outputs has {', '.join(names)}")
    tensors = [_to_tensor(spec, answer[spec.name]) for spec in specs]
    size = sum(len(tensor.data) for tensor in tensors)
    if size > MAX_ANSWER_BYTES:
        raise _mismatch_error(
            f"infer returned {size} bytes; an answer may have at most {MAX_ANSWER_BYTES}: "
            "split it (python.is_decoupled)"
        )
    return tensors


def _to_tensor(spec: TensorSpec, array: object) -> Tensor:
    if not isinstance(array, np.ndarray):
        raise _mismatch_error(f"output '{spec.name}' is a {type(array).__name__}; it must be a NumPy array")
    try:
        tensor = from_array(spec.name, array)
    except InvalidTensor:
        raise _mismatch_error(
            f"output '{spec.name}' has dtype {array.dtype}; python.outputs says {spec.datatype}"
        ) from None
    except (AttributeError, TypeError):
        raise _mismatch_error(f"output '{spec.name}' has an element that is neither bytes nor str") from None
    if tensor.datatype != spec.datatype:
        raise _mismatch_error(f"output '{spec.name}' is {tensor.datatype}; python.outputs says {spec.datatype}")
    if not is_shape_accepted(tensor.shape, spec.shape):
        raise _mismatch_error(
            f"output '{spec.name}' has shape {list(tensor.shape)}; python.outputs says {list(spec.shape)}"
        )
    return tensor


def describe(error: BaseException, own_files: Sequence[str]) -> str:
    """Return an error's text and the end of its traceback, without the first frames that are in `own_files`."""
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith((*own_files, "<frozen importlib")):
        at = at.tb_next
    summary = traceback.format_exception_only(error)[-1].strip()[:MAX_SUMMARY_CHARS]
    return f"{summary}\n{cut_to_last_lines(''.join(traceback.format_exception(type(error), error, at)))}"


def _mismatch_error(text: str) -> EngineFailed:
    return EngineFailed(text, reason="output_mismatch")
