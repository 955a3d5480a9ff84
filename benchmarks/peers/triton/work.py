"""The served models for both ways into Triton: the tensors of each workload, and a function for a batch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class TensorForm(NamedTuple):
    name: str
    datatype: str
    size: int  # of a row


INPUTS = {
    "minilm": TensorForm("text", "TYPE_STRING", 1),
    "srcnn": TensorForm("image", "TYPE_STRING", 1),
    "noop": TensorForm("x", "TYPE_FP32", 256),
}
OUTPUTS = {
    "minilm": TensorForm("vector", "TYPE_FP32", 384),
    "srcnn": TensorForm("upscaled", "TYPE_STRING", 1),
    "noop": TensorForm("y", "TYPE_FP32", 256),
}


def batch_run(workload: str, options: Mapping[str, str]) -> Callable[[Any], Any]:
    """Return a function from an array [n, size of the input's row] to an array [n, size of the output's row]."""
    import numpy as np
    from handler import load

    model = load(workload, options["model"], options["engine"], int(options["threads"]))
    if workload == "noop":
        run: Callable[[Any], Any] = model.run
        return run
    if workload == "srcnn":
        return lambda photos: np.array([[model.upscale(photo)] for photo in photos[:, 0]], dtype=object)
    embed = model.embed_alike if options["alike"] == "True" else model.embed
    return lambda texts: embed([text.decode() for text in texts[:, 0]])
