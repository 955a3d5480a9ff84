"""Checks a network's inputs and outputs, for several tasks."""

from collections.abc import Sequence

from penstock.core.errors import ConfigError
from penstock.core.signature import Signature
from penstock.core.tensors import TensorSpec

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
FLOATS = ("FP32", "FP16", "BF16", "FP64")
PIXELS = ("FP32", "FP16", "UINT8")
CHANNELS = {"rgb": 3, "bgr": 3, "gray": 1}


def has_text_inputs(engine: Signature) -> bool:
    return {IDS, MASK} <= {spec.name for spec in engine.inputs} <= {IDS, MASK, TYPES}


def has_image_input(engine: Signature) -> bool:
    """Return whether the network has one input, shaped like images: four dimensions, with channels second or last."""
    if len(engine.inputs) != 1:
        return False
    (spec,) = engine.inputs
    is_plane = len(spec.shape) == 4 and not {spec.shape[1], spec.shape[3]}.isdisjoint(CHANNELS.values())
    return is_plane and spec.datatype in PIXELS


def find_output(engine: Signature, name: str, setting: str, datatypes: Sequence[str] = FLOATS) -> TensorSpec:
    """Return the network's output `name`; raise ConfigError unless its shape is [batch, width].

    `setting`: the key of model.yaml that sets the name, for the error message.
    """
    outputs = {spec.name: spec for spec in engine.outputs}
    if name not in outputs:
        problem = f"the network has no output '{name}'; its outputs are {', '.join(outputs)}"
        raise ConfigError(f"{setting}: {problem}", reason="task_mismatch")
    found = outputs[name]
    if found.datatype not in datatypes or len(found.shape) != 2:
        kinds = " or ".join(datatypes)
        raise ConfigError(
            f"{setting}: '{name}' must be {kinds} [batch, width]; got {found.datatype} {list(found.shape)}",
            reason="task_mismatch",
        )
    return found
