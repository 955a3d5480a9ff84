"""`penstock infer`: any model, tensors from files or the command line."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.files import read_array, read_bytes, telling
from penstock.cli.terminal.options import GRPC_ADDRESS, AsJson, GrpcAddress, Timeout
from penstock.cli.terminal.output import plain, print_json
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.client import ModelSignature
    from penstock.core.tensors import Array, TensorSpec

SHOWN_NUMBERS = 8
INPUT_HELP = "NAME=@file.npy, NAME=@photo.jpg (its bytes), NAME=[1, 2, 3] (JSON) or NAME=text. Repeat for each input."


@shows_key
def infer(
    access: Access,
    model: Annotated[str, typer.Argument(help="The model's name.")],
    inputs: Annotated[list[str] | None, typer.Option("--input", "-i", metavar="NAME=VALUE", help=INPUT_HELP)] = None,
    outputs: Annotated[list[str] | None, typer.Option("--output", "-o", help="Only these outputs.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Write NAME.npy here, and NAME.bin for bytes.")] = None,
    version: Annotated[str, typer.Option("--model-version", help="A version; else the newest.")] = "",
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Run any model once."""
    from penstock.client import Client

    with Client(grpc, timeout, **access.options) as client:
        signature = client.signature(model, version)
        found = client.infer(model, read_inputs(signature, inputs or []), outputs or (), version)
    files = _save(output_dir, found) if output_dir is not None else {}
    if as_json:
        print_json([_as_json(name, array, files.get(name)) for name, array in found.items()], indent=None)
        return
    for name, array in found.items():
        print(f"{plain(name)} {_datatype(array)} {list(array.shape)} {_summary(array)}")
        for file in files.get(name, ()):
            print(f"  written to {file}")


def read_inputs(signature: "ModelSignature", given: Sequence[str]) -> dict[str, "Array"]:
    specs = {spec.name: spec for spec in signature.inputs}
    takes = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in signature.inputs)
    arrays: dict[str, Array] = {}
    for item in given:
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
        return _fit(spec, read_array(file)) if file.suffix == ".npy" else _convert(spec, read_bytes(file))
    is_array = value.startswith("[")
    if spec.datatype == "BYTES" and not is_array:
        return _convert(spec, value)
    try:
        return _convert(spec, json.loads(value))
    except ValueError as error:
        if spec.datatype == "BYTES":
            return _convert(spec, value)
        if is_array:
            raise InvalidRequest(f"input '{spec.name}': {value!r:.60} is not a JSON array: {error}") from error
        raise InvalidRequest(
            f"input '{spec.name}' takes {spec.datatype}: give [1, 2, 3] or @file.npy, not {value!r:.60}"
        ) from error


def _convert(spec: "TensorSpec", value: object) -> "Array":
    """A JSON value or bytes as the datatype that the model takes."""
    import numpy as np

    from penstock.core.tensors import NUMPY_TYPES

    if spec.datatype == "BYTES":
        return _fit(spec, np.array(value, dtype=object))
    if isinstance(value, bytes):
        raise InvalidRequest(f"input '{spec.name}' takes {spec.datatype}: give a .npy file")
    try:
        return _fit(spec, np.array(value, dtype=NUMPY_TYPES[spec.datatype]))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"input '{spec.name}' takes {spec.datatype}: {error}") from error


def _fit(spec: "TensorSpec", array: "Array") -> "Array":
    """Dimensions of one may be left out: the model's batch of one, or those that the model fixes at the end."""
    missing = spec.shape[array.ndim :]
    ones = (1,) * len(missing)
    return array.reshape(array.shape + ones if missing == ones else ones + array.shape)


def _save(folder: Path, found: Mapping[str, "Array"]) -> dict[str, list[str]]:
    """Output names may hold slashes: those become underscores."""
    import numpy as np

    written: dict[str, list[str]] = {}
    with telling(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in found.items():
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


def _as_json(name: str, array: "Array", files: list[str] | None) -> dict[str, object]:
    facts: dict[str, object] = {"name": name, "datatype": _datatype(array), "shape": list(array.shape)}
    if files is not None:
        return facts | {"files": files}
    if array.dtype != object:
        return facts | {"data": array.ravel().tolist()}
    try:
        return facts | {"data": [element.decode() for element in array.flat]}
    except UnicodeDecodeError:
        return facts | {"data_base64": [b64encode(element).decode() for element in array.flat]}


def _datatype(array: "Array") -> str:
    from penstock.core.tensors import BYTES, DATATYPES

    return BYTES if array.dtype == object else DATATYPES[array.dtype]


def _summary(array: "Array") -> str:
    if array.dtype == object:
        shown = ", ".join(_short(element) for element in list(array.flat)[:SHOWN_NUMBERS])
    else:
        shown = ", ".join(f"{number:g}" for number in array.ravel()[:SHOWN_NUMBERS].astype(float))
    return f"[{shown}{', …' if array.size > SHOWN_NUMBERS else ''}]"


def _short(element: bytes) -> str:
    try:
        text = element.decode()
    except UnicodeDecodeError:
        return f"{len(element)} bytes"
    return repr(text) if len(text) <= 60 else f"{len(element)} bytes"
