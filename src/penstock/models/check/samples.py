"""A sample request to any model, and how to send it from a shell."""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.settings import GENERATE
from penstock.core.tensors import BYTES, NUMPY_TYPES, Array, TensorSpec
from penstock.tasks.images.png import encode_png

if TYPE_CHECKING:
    from penstock.core.blocks import BlockDescription

TEXT = "A penstock meters water onto turbines."
QUERY = "What does a penstock do?"
OPEN_SIZE = 8  # stands in for a size that the model leaves open
SHOWN_NUMBERS = 16  # in a command; more come from a file
SIDE = 48  # pixels


def sample_inputs(specs: Sequence[TensorSpec], is_batched: bool) -> dict[str, Array]:
    """Zeros of the model's shapes; where it takes bytes, a text or a small picture."""
    return {spec.name: _sample(spec, is_batched) for spec in specs if not spec.is_optional}


def _sample(spec: TensorSpec, is_batched: bool) -> Array:
    shape = [OPEN_SIZE if size < 0 else size for size in spec.shape]
    if shape and (is_batched or spec.datatype == BYTES) and spec.shape[0] < 0:
        shape[0] = 1
    if spec.datatype == BYTES:
        return np.full(shape, _bytes_for(spec.name), dtype=object)
    return np.zeros(shape, NUMPY_TYPES[spec.datatype])


def _bytes_for(name: str) -> bytes:
    if _is_image(name):
        return _picture()
    return (QUERY if name == "query" else TEXT).encode()


def _is_image(name: str) -> bool:
    return any(word in name.lower() for word in ("image", "photo", "picture"))


def _picture() -> bytes:
    """A PNG whose red grows to the right and whose green grows downwards."""
    down, right = 5 * np.mgrid[:SIDE, :SIDE].astype(np.uint8)
    return b"".join(encode_png((SIDE, SIDE), [np.dstack((right, down, np.full_like(down, 128)))], None))


def example_command(block: "BlockDescription", inputs: Mapping[str, Array]) -> str:
    """What to type to get an answer from it, once it is served on the default ports."""
    name = shlex.quote(block.model)
    if block.settings.is_decoupled:
        return _stream_command(block.model, inputs)
    if block.settings.task == "embed":
        return f"penstock embed {shlex.quote(TEXT)} --model {name}"
    if block.settings.task == GENERATE:
        return f"penstock generate {shlex.quote(TEXT)} --model {name}"
    if block.settings.task == "upscale":
        return f"penstock upscale photo.jpg larger.png --model {name}"
    made, given = [], []
    for key, array in inputs.items():
        if array.dtype != object and array.size > SHOWN_NUMBERS:
            made.append(f"numpy.save('{_file(key)}', numpy.zeros({array.shape}, '{array.dtype}'))")
        given.append("-i " + shlex.quote(f"{key}={_value(key, array)}"))
    command = f"penstock infer {name} {' '.join(given)}"
    return f'python -c "import numpy; {"; ".join(made)}" && {command}' if made else command


def _stream_command(model: str, inputs: Mapping[str, Array]) -> str:
    """Many answers to a request: the client library gives them one by one."""
    made = ", ".join(
        f"{name!r}: numpy.full({array.shape}, {_bytes_for(name)!r}, object)"
        if array.dtype == object
        else f"{name!r}: numpy.zeros({array.shape}, '{array.dtype}')"
        for name, array in inputs.items()
    )
    loop = f"[print(answer) for answer in Client().infer_stream({model!r}, {{{made}}})]"
    program = f"import numpy; from penstock.client import Client; {loop}"
    # Easier to read than what shlex makes of its quotes, where nothing in it means something to a shell.
    return f"python -c {shlex.quote(program)}" if set(program) & set('"$`\\!') else f'python -c "{program}"'


def _value(name: str, array: Array) -> str:
    if array.dtype == object:
        return "@photo.jpg" if _is_image(name) else _bytes_for(name).decode()
    return f"@{_file(name)}" if array.size > SHOWN_NUMBERS else str(array.tolist()).replace("False", "false")


def _file(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name) + ".npy"
