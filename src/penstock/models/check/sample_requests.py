"""Sample requests for any model, and shell commands that send them."""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.tensors import BYTES, NUMPY_TYPES, Array, TensorSpec
from penstock.models.samples.photos import find_photo
from penstock.tasks.built_in import load_description
from penstock.tasks.images.png import encode_png

if TYPE_CHECKING:
    from penstock.core.blocks import BlockDescription

TEXT = "A penstock meters water onto turbines."
QUERY = "What does a penstock do?"
OPEN_SIZE = 8  # used for sizes that the model leaves open
SHOWN_NUMBERS = 16  # most numbers in a command; longer arrays are read from a file
SIDE = 48  # pixels


def sample_inputs(specs: Sequence[TensorSpec], is_batched: bool) -> dict[str, Array]:
    """Return an array for each input: zeros, or a short text or small picture for BYTES inputs."""
    return {spec.name: _sample_array(spec, is_batched) for spec in specs if not spec.is_optional}


def _sample_array(spec: TensorSpec, is_batched: bool) -> Array:
    shape = [OPEN_SIZE if size < 0 else size for size in spec.shape]
    if shape and (is_batched or spec.datatype == BYTES) and spec.shape[0] < 0:
        shape[0] = 1
    if spec.datatype == BYTES:
        return np.full(shape, _sample_bytes(spec.name), dtype=object)
    return np.zeros(shape, NUMPY_TYPES[spec.datatype])


def _sample_bytes(name: str) -> bytes:
    if _is_image(name):
        return _make_picture()
    return (QUERY if name == "query" else TEXT).encode()


def _is_image(name: str) -> bool:
    return any(word in name.lower() for word in ("image", "photo", "picture"))


def _make_picture() -> bytes:
    """Return a PNG file with a red gradient to the right and a green gradient downwards."""
    down, right = 5 * np.mgrid[:SIDE, :SIDE].astype(np.uint8)
    return b"".join(encode_png((SIDE, SIDE), [np.dstack((right, down, np.full_like(down, 128)))], None))


def example_command(block: "BlockDescription", inputs: Mapping[str, Array]) -> str:
    """Return a shell command that sends a sample request to a server on the default ports."""
    name = shlex.quote(block.model)
    if block.settings.is_decoupled:
        return _stream_command(block.model, inputs)
    if example := load_description(block.settings.task).example:
        return example.format(text=shlex.quote(TEXT), photo=shlex.quote(find_photo()), model=name)
    made, given = [], []
    for key, array in inputs.items():
        if array.dtype != object and array.size > SHOWN_NUMBERS:
            made.append(f"numpy.save('{_file_name(key)}', numpy.zeros({array.shape}, '{array.dtype}'))")
        given.append("-i " + shlex.quote(f"{key}={_format_value(key, array)}"))
    command = f"penstock infer {name} {' '.join(given)}"
    return f'python -c "import numpy; {"; ".join(made)}" && {command}' if made else command


def _stream_command(model: str, inputs: Mapping[str, Array]) -> str:
    """Return a command that prints all answers of a decoupled model."""
    made = ", ".join(
        f"{name!r}: numpy.full({array.shape}, {_sample_bytes(name)!r}, object)"
        if array.dtype == object
        else f"{name!r}: numpy.zeros({array.shape}, '{array.dtype}')"
        for name, array in inputs.items()
    )
    loop = f"[print(answer) for answer in Client().infer_stream({model!r}, {{{made}}})]"
    program = f"import numpy; from penstock.client import Client; {loop}"
    # Double quotes, which are easier to read than shlex's, if the program has no characters that are special in them.
    return f"python -c {shlex.quote(program)}" if set(program) & set('"$`\\!') else f'python -c "{program}"'


def _format_value(name: str, array: Array) -> str:
    if array.dtype == object:
        return f"@{find_photo()}" if _is_image(name) else _sample_bytes(name).decode()
    return f"@{_file_name(name)}" if array.size > SHOWN_NUMBERS else str(array.tolist()).replace("False", "false")


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name) + ".npy"
