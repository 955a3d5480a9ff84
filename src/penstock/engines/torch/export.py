"""Opens torch.export files, which describe their inputs and outputs.

This file is the adapter for `torch.utils._pytree`; tests/unit/engines/torch/test_torch_files.py fails if a new
version changes it.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from penstock.core.errors import ConfigError
from penstock.core.signature import DeclaredTensor
from penstock.core.tensors import TensorSpec
from penstock.engines.engine_options import TorchOptions
from penstock.engines.torch.torch_devices import Target
from penstock.engines.torch.torch_model import DATATYPES, TorchModel, choose_precision, iterate_tensors

_MATRIX_OPS = (
    "linear",
    "matmul",
    "mm",
    "addmm",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
)  # the operations that autocast converts

Fill = Callable[[Sequence[Any]], tuple[Sequence[Any], dict[str, Any]]]


def open_program(file: Path, options: TorchOptions, target: Target) -> TorchModel:
    # In some releases, loading a file makes PyTorch warn about its own code.
    warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
    program = torch.export.load(file)
    weights = [*program.state_dict.values(), *program.constants.values()]
    weights = [each for each in weights if isinstance(each, torch.Tensor)]
    if target.device_kind != "cpu" or any(each.device.type != "cpu" for each in weights):
        program = move_to_device_pass(program, target.device)
    own_inputs, fill_padded = _read_inputs(file, program)
    inputs, places = _match_tensors("inputs", own_inputs, options.inputs)
    outputs, chosen = _match_tensors("outputs", _read_outputs(file, program), options.outputs)
    if len(inputs) < len(own_inputs):
        given = ", ".join(option.name for option in options.inputs)
        raise ConfigError(
            f"torch.inputs has {given}, but {file.name} takes {_join_names(own_inputs)}: list exactly these",
            reason="torch_inputs",
        )
    precision, autocast = choose_precision(file, weights, target)
    module = program.module()
    if autocast is not None:
        _prepare_for_autocast(program, module, autocast)

    def forward(tensors: Sequence[Any]) -> Any:
        ordered = [tensor for _, tensor in sorted(zip(places, tensors, strict=True), key=lambda pair: pair[0])]
        arguments, keywords = fill_padded(ordered)
        found = [leaf for _, leaf in iterate_tensors(module(*arguments, **keywords))]
        return [found[place] for place in chosen]

    return TorchModel(inputs, outputs, precision, module, forward, autocast=autocast)


def _read_inputs(file: Path, program: Any) -> tuple[list[TensorSpec], Fill]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    arguments = [each.arg for each in program.graph_signature.input_specs if each.kind == InputKind.USER_INPUT]
    found = []
    for argument in arguments:
        if isinstance(argument, TensorArgument):
            found.append(_to_spec(file, argument.name, values[argument.name]))
        elif not isinstance(argument, ConstantArgument):
            raise ConfigError(f"{file}: its input '{argument.name}' is not a tensor; only tensors are supported")

    def fill_padded(given_tensors: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        unused = iter(given_tensors)
        flat = [each.value if isinstance(each, ConstantArgument) else next(unused) for each in arguments]
        positional, keywords = pytree.tree_unflatten(flat, program.call_spec.in_spec)
        return positional, keywords

    return found, fill_padded


def _read_outputs(file: Path, program: Any) -> list[TensorSpec]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    arguments = [each.arg for each in program.graph_signature.output_specs if each.kind == OutputKind.USER_OUTPUT]
    # Unflatten the arguments to find each output's position in the module's result.
    given = iterate_tensors(pytree.tree_unflatten(arguments, program.call_spec.out_spec))
    found = []
    for name, argument in given:
        if isinstance(argument, ConstantArgument) and argument.value is None:
            continue
        if not isinstance(argument, TensorArgument):
            raise ConfigError(f"{file}: its output '{name}' is not a tensor; only tensors are supported")
        shown = f"output_{name}".rstrip("_") if not name or name[0].isdigit() else name
        found.append(_to_spec(file, shown, values[argument.name]))
    return found


def _to_spec(file: Path, name: str, value: Any) -> TensorSpec:
    datatype = DATATYPES.get(value.dtype)
    if datatype is None:
        raise ConfigError(
            f"{file}: '{name}' is {value.dtype}, which Penstock does not support: convert it before the export"
        )
    return TensorSpec(name, datatype, tuple(size if isinstance(size, int) else -1 for size in value.shape))


def _match_tensors(
    section: str, file_tensors: Sequence[TensorSpec], options: Sequence[DeclaredTensor]
) -> tuple[tuple[TensorSpec, ...], list[int]]:
    """Return the tensors declared in model.yaml, and the index in the file of each.

    If all declared names are in the file, tensors are matched by name, otherwise by position.
    """
    if not options:
        return tuple(file_tensors), list(range(len(file_tensors)))
    known = [spec.name for spec in file_tensors]
    given = [option.name for option in options]
    is_renamed = not set(given) <= set(known)
    places = list(range(len(given))) if is_renamed else [known.index(name) for name in given]
    is_mixed = is_renamed and any(name in known and known.index(name) != place for place, name in enumerate(given))
    if is_mixed or (is_renamed and len(given) != len(known)):
        raise ConfigError(
            f"torch.{section}: the file has {_join_names(file_tensors)}; list all of these names, in this order",
            reason="torch_inputs",
        )
    for option, place in zip(options, places, strict=True):
        _check_alike(section, file_tensors[place], option)
    return tuple(option.spec for option in options), places


def _check_alike(section: str, file_tensor: TensorSpec, option: DeclaredTensor) -> None:
    is_alike = file_tensor.datatype == option.datatype and len(file_tensor.shape) == len(option.shape)
    if not is_alike or any(
        -1 not in pair and pair[0] != pair[1] for pair in zip(file_tensor.shape, option.shape, strict=True)
    ):
        raise ConfigError(
            f"torch.{section}: '{option.name}' is {file_tensor.datatype} {list(file_tensor.shape)} in the file, "
            f"not {option.datatype} {list(option.shape)}",
            reason="torch_inputs",
        )


def _join_names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


def _prepare_for_autocast(program: Any, module: Any, dtype: Any) -> None:
    """Prepare for autocast: remove checks that tensors are FP32, and convert weights once instead of in each call."""
    targets = dict(program.graph_signature.inputs_to_parameters)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in targets and node.users:
            ops = {str(user.target).removeprefix("aten.").partition(".")[0] for user in node.users}
            weight = module.get_parameter(targets[node.name])
            if ops <= set(_MATRIX_OPS) and weight.dim() > 1:
                weight.data = weight.data.to(dtype)
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in list(part.graph.nodes):
                if "_assert_tensor_metadata" in str(node.target):
                    part.graph.erase_node(node)
            part.recompile()
