"""Parameters that come as inputs: as clients of Triton's TensorRT-LLM backend send them."""

from collections.abc import Mapping

from penstock.core.errors import InvalidTensor
from penstock.core.tensors import Tensor, check_tensor, to_array
from penstock.tasks.generate.parameters import NAMES

STOP = "stop"
MAX_BYTES = 64 * 1024
# What that backend calls by other names, and what may be sent there to say nothing.
OTHER_NAMES: Mapping[str, str] = {
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "return_log_probs": "logprobs",
    "stop_words": STOP,
}
SAYS_NOTHING: Mapping[str, object] = {"bad_words": "", "beam_width": 1, "length_penalty": 1.0, "top_p": 0.0}
TENSOR_NAMES = NAMES - {"stream", "echo"} | OTHER_NAMES.keys() | SAYS_NOTHING.keys()


def parameters_of(inputs: Mapping[str, Tensor]) -> dict[str, object]:
    """Of those inputs that are parameters."""
    found: dict[str, object] = {}
    for name in TENSOR_NAMES & inputs.keys():
        values = _values(inputs[name])
        own = OTHER_NAMES.get(name, name)
        if own == STOP:
            values = [value for value in values if value != ""]
            found |= {STOP: values} if values else {}
        elif len(values) != 1:
            raise InvalidTensor(f"input '{name}' is a parameter, of one element; got {len(values)}")
        elif name not in SAYS_NOTHING or values[0] != SAYS_NOTHING[name]:
            if own not in NAMES:
                raise InvalidTensor(f"input '{name}' is {values[0]!r:.80}, which is not supported: leave it out")
            found[own] = values[0]
    return found


def _values(tensor: Tensor) -> list[object]:
    if len(tensor.data) > MAX_BYTES:
        raise InvalidTensor(f"input '{tensor.name}' is a parameter, of at most {MAX_BYTES} bytes")
    check_tensor(tensor)
    elements = to_array(tensor).ravel().tolist()
    return [each.decode(errors="replace") if isinstance(each, bytes) else each for each in elements]
