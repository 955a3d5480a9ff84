"""What a task asks of its model's network."""

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
    """Whether its only input looks like images: four dimensions, with colours second or last."""
    if len(engine.inputs) != 1:
        return False
    (spec,) = engine.inputs
    is_plane = len(spec.shape) == 4 and not {spec.shape[1], spec.shape[3]}.isdisjoint(CHANNELS.values())
    return is_plane and spec.datatype in PIXELS


def find_output(engine: Signature, name: str, setting: str, datatypes: Sequence[str] = FLOATS) -> TensorSpec:
    """The output of that name, which must be a row of numbers for each row; `setting` is where a user names it."""
    outputs = {spec.name: spec for spec in engine.outputs}
    if name not in outputs:
        problem = f"the network has no output '{name}'; it has {', '.join(outputs)}"
        raise ConfigError(f"{setting}: {problem}", reason="task_mismatch")
    found = outputs[name]
    if found.datatype not in datatypes or len(found.shape) != 2:
        kinds = " or ".join(datatypes)
        raise ConfigError(
            f"{setting}: '{name}' must be {kinds} [batch, width]; got {found.datatype} {list(found.shape)}",
            reason="task_mismatch",
        )
    return found
