"""`penstock infer`: run any model with tensors from files or the command line."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import InvalidRequest
from penstock.terminal.command_files import name_file_in_errors, read_array, read_bytes
from penstock.terminal.output import escape_controls, print_json
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson, Timeout, read_model_name

if TYPE_CHECKING:
    from penstock.client import ModelSignature
    from penstock.core.requests import Parameter
    from penstock.core.tensors import Array, TensorSpec

SHOWN_NUMBERS = 8
INPUT_HELP = (
    "An input: NAME=@file.npy, NAME=@photo.jpg (its bytes), NAME=[1, 2, 3] (JSON) or NAME=text; repeat for each input. "
    "[default: none]"
)


@takes_server
def infer(
    server: Server,
    model: Annotated[
        str, typer.Argument(callback=read_model_name, help="Name of the model, or the path of its folder.")
    ],
    inputs: Annotated[list[str] | None, typer.Option("--input", "-i", metavar="NAME=VALUE", help=INPUT_HELP)] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--output", "-o", help="Return only this output; may be repeated. [default: all]"),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Write each output to this folder, as NAME.npy or as NAME.bin for bytes. [default: none]"),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            "-p",
            metavar="NAME=VALUE",
            help="A parameter of the request; VALUE is a number, true, false or text; may be repeated. [default: none]",
        ),
    ] = None,
    version: Annotated[
        str, typer.Option("--model-version", help="Version of the model. [default: the newest served]")
    ] = "",
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Run one inference with any model."""
    from penstock.client import Client

    with Client(server.grpc, timeout, **server.access.options) as client:
        signature = client.signature(model, version)
        found = client.infer(
            model,
            read_inputs(signature, inputs or []),
            outputs or (),
            version,
            parameters=read_parameters(parameters or []),
        )
    files = _save(output_dir, found) if output_dir is not None else {}
    if as_json:
        print_json([_to_json(name, array, files.get(name)) for name, array in found.items()], indent=None)
        return
    for name, array in found.items():
        print(f"{escape_controls(name)} {_find_datatype(array)} {list(array.shape)} {_summarize_array(array)}")
        for file in files.get(name, ()):
            print(f"  written to {file}")


def read_parameters(assignments: Sequence[str]) -> "dict[str, Parameter]":
    found: dict[str, Parameter] = {}
    for item in assignments:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"--parameter {item}: expected NAME=VALUE, such as top_k=2")
        try:
            read = json.loads(value)
        except ValueError:
            read = value
        found[name] = read if isinstance(read, bool | int | float) else value
    return found


def read_inputs(signature: "ModelSignature", assignments: Sequence[str]) -> dict[str, "Array"]:
    specs = {spec.name: spec for spec in signature.inputs}
    takes = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in signature.inputs)
    arrays: dict[str, Array] = {}
    for item in assignments:
        name, equals, value = item.partition("=")
        if not equals:
            raise InvalidRequest(f"--input {item}: expected NAME=VALUE; model '{signature.name}' takes {takes}")
        if name not in specs or name in arrays:
            what = "is given twice" if name in arrays else "is unknown"
            raise InvalidRequest(f"input '{name}' {what}; model '{signature.name}' takes {takes}")
        arrays[name] = _read_value(specs[name], value)
    if missing := [name for name in specs if name not in arrays]:
        raise InvalidRequest(f"input '{missing[0]}' is missing; model '{signature.name}' takes {takes}")
    return arrays


def _read_value(spec: "TensorSpec", value: str) -> "Array":
    if value.startswith("@"):
        file = Path(value[1:])
        if file.suffix == ".npy":
            return _add_dimensions(spec, read_array(file))
        return _convert_value(spec, read_bytes(file))
    is_array = value.startswith("[")
    if spec.datatype == "BYTES" and not is_array:
        return _convert_value(spec, value)
    try:
        return _convert_value(spec, json.loads(value))
    except ValueError as error:
        if spec.datatype == "BYTES":
            return _convert_value(spec, value)
        if is_array:
            raise InvalidRequest(f"input '{spec.name}': {value!r:.60} is not a JSON array: {error}") from error
        raise InvalidRequest(
            f"input '{spec.name}' takes {spec.datatype}: give [1, 2, 3] or @file.npy, not {value!r:.60}"
        ) from error


def _convert_value(spec: "TensorSpec", value: object) -> "Array":
    """Convert a JSON value or bytes to the datatype of the input."""
    import numpy as np

    from penstock.core.tensors import NUMPY_TYPES

    if spec.datatype == "BYTES":
        return _add_dimensions(spec, np.array(value, dtype=object))
    if isinstance(value, bytes):
        raise InvalidRequest(f"input '{spec.name}' takes {spec.datatype}: give a .npy file")
    try:
        return _add_dimensions(spec, np.array(value, dtype=NUMPY_TYPES[spec.datatype]))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"input '{spec.name}' takes {spec.datatype}: {error}") from error


def _add_dimensions(spec: "TensorSpec", array: "Array") -> "Array":
    """Add missing dimensions of size 1: at the end if the model's shape ends with fixed 1s, otherwise at the start."""
    missing = spec.shape[array.ndim :]
    ones = (1,) * len(missing)
    return array.reshape(array.shape + ones if missing == ones else ones + array.shape)


def _save(folder: Path, outputs: Mapping[str, "Array"]) -> dict[str, list[str]]:
    """Write the outputs and return the files by output name. Slashes in names become underscores."""
    import numpy as np

    written: dict[str, list[str]] = {}
    with name_file_in_errors(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in outputs.items():
            stem = name.replace("/", "_").lstrip(".") or "output"
            if array.dtype == object:
                names = [f"{stem}.bin"] if array.size == 1 else [f"{stem}.{i}.bin" for i in range(array.size)]
                for file, element in zip(names, array.flat, strict=True):
                    (folder / file).write_bytes(element)
            else:
                names = [f"{stem}.npy"]
                np.save(folder / names[0], array)
            written[name] = [str(folder / file) for file in names]
    return written


def _to_json(name: str, array: "Array", files: list[str] | None) -> dict[str, object]:
    facts: dict[str, object] = {"name": name, "datatype": _find_datatype(array), "shape": list(array.shape)}
    if files is not None:
        return facts | {"files": files}
    if array.dtype != object:
        return facts | {"data": array.ravel().tolist()}
    try:
        return facts | {"data": [element.decode() for element in array.flat]}
    except UnicodeDecodeError:
        return facts | {"data_base64": [b64encode(element).decode() for element in array.flat]}


def _find_datatype(array: "Array") -> str:
    from penstock.core.tensors import BYTES, DATATYPES

    return BYTES if array.dtype == object else DATATYPES[array.dtype]


def _summarize_array(array: "Array") -> str:
    if array.dtype == object:
        shown = ", ".join(_describe_element(element) for element in list(array.flat)[:SHOWN_NUMBERS])
    else:
        shown = ", ".join(f"{number:g}" for number in array.ravel()[:SHOWN_NUMBERS].astype(float))
    return f"[{shown}{', …' if array.size > SHOWN_NUMBERS else ''}]"


def _describe_element(element: bytes) -> str:
    try:
        text = element.decode()
    except UnicodeDecodeError:
        return f"{len(element)} bytes"
    return repr(text) if len(text) <= 60 else f"{len(element)} bytes"
