"""The generate task: converts a request's prompts and parameters to generations, and their text to answers."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from penstock.core.errors import InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.generation import Generation
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, Array, Tensor, TensorSpec, check_tensor, unpack_bytes
from penstock.tasks.base import Prepared, TaskRequest, TaskSignature
from penstock.tasks.columns import check_column, check_outputs
from penstock.tasks.generate.answer import (
    COUNTS,
    DEFAULT_OUTPUTS,
    FINISH_REASON,
    INDEX,
    LOGPROBS,
    TEXT_OUTPUT,
    TOKEN_BYTES,
    TOKEN_IDS,
    TOKEN_OUTPUTS,
    USAGE,
    GenerationAnswer,
)
from penstock.tasks.generate.parameters import (
    MAX_CHOICES,
    NAMES,
    TENSOR_NAMES,
    read_flag,
    read_parameter_inputs,
    read_sampling,
)
from penstock.tasks.generate.prompts import INPUT_IDS, INPUT_LENGTHS, MESSAGES, TEXT_INPUT, read_prompts
from penstock.tasks.options import GenerateOptions

STREAM, SAMPLING, EXCLUDE = "stream", "sampling_parameters", "exclude_input_in_output"
OPTIONAL = (
    TensorSpec(INPUT_LENGTHS, "INT32", (-1,), is_optional=True),
    TensorSpec(STREAM, "BOOL", (1,), is_optional=True),
    TensorSpec(SAMPLING, BYTES, (1,), is_optional=True),
    TensorSpec(EXCLUDE, "BOOL", (1,), is_optional=True),
)
OUTPUTS = (
    TensorSpec(TEXT_OUTPUT, BYTES, (-1,)),
    TensorSpec(INDEX, "INT32", (-1,)),
    TensorSpec(FINISH_REASON, BYTES, (-1,)),
    TensorSpec(USAGE, "INT32", (3,)),
    TensorSpec(TOKEN_IDS, "INT32", (-1,)),
    TensorSpec(TOKEN_BYTES, BYTES, (-1,)),
    TensorSpec(LOGPROBS, "FP32", (-1,)),
    TensorSpec(COUNTS, "INT32", (-1,)),
)
MAX_SAMPLING_BYTES = 512 * 1024


class GenerateTask:
    """Converts a request to generations, and their results to an answer.

    A request is not split into pieces, because the engine itself batches the running generations.
    """

    is_prepare_cheap = True
    is_finish_cheap = True

    def __init__(self, options: GenerateOptions, engine: Signature) -> None:
        """Accept chat messages only if the engine has an input `messages`, which means that it has a chat template."""
        self._defaults = options.defaults.model_dump(exclude_none=True)
        self._most_tokens = options.max_tokens
        has_template = any(spec.name == MESSAGES for spec in engine.inputs)
        chat = (TensorSpec(MESSAGES, BYTES, (1,), is_optional=True),) if has_template else ()
        prompts = (TensorSpec(TEXT_INPUT, BYTES, (-1,)), *chat, TensorSpec(INPUT_IDS, "INT64", (-1,), is_optional=True))
        self._prompts = [spec.name for spec in prompts]
        self.signature = TaskSignature((*prompts, *OPTIONAL), OUTPUTS, 0)

    def prepare(self, request: TaskRequest) -> Prepared:
        check_outputs(request, [spec.name for spec in OUTPUTS])
        inputs = self._check_inputs(request.inputs)
        parameters = self._merge_parameters(request, inputs)
        given = [name for name in self._prompts if name in inputs]
        if len(given) != 1:
            raise InvalidTensor(
                f"the request must have exactly one of the inputs {', '.join(map(repr, self._prompts))}; "
                f"got {' and '.join(map(repr, given)) or 'none'}"
            )
        has_echo = self._read_echo(inputs, parameters, given[0])
        prompts = read_prompts(inputs[given[0]], parameters, inputs.get(INPUT_LENGTHS), has_echo)
        sampling = read_sampling(parameters, self._defaults, self._most_tokens)
        if len(prompts) * sampling.n > MAX_CHOICES:
            raise RequestTooLarge(
                f"{len(prompts)} prompts with {sampling.n} choices each; at most {MAX_CHOICES} choices are allowed "
                "per request: send fewer prompts, or a smaller n"
            )
        if not sampling.has_logprobs and not {LOGPROBS, TOKEN_BYTES}.isdisjoint(request.outputs):
            sampling = read_sampling({**parameters, "logprobs": True}, self._defaults, self._most_tokens)
        echoes = [prompt.text for prompt in prompts] if has_echo and prompts[0].text else []
        outputs = request.outputs or (*DEFAULT_OUTPUTS, *(TOKEN_OUTPUTS if sampling.has_logprobs else ()))
        is_streamed = _read_flag_input(inputs, parameters, STREAM, True)
        answer = GenerationAnswer([Generation(prompt, sampling) for prompt in prompts], outputs, is_streamed, echoes)
        return Prepared([], answer)

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        """Return the part of the answer that is new since the last call, and set the parameter `tokens` to its size."""
        answer: GenerationAnswer = prepared.context
        prepared.parameters = {"tokens": answer.take_count()}
        return answer.take()

    def _check_inputs(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        found = {tensor.name: tensor for tensor in tensors}
        known = [*self._prompts, *(spec.name for spec in OPTIONAL)]
        for name in found:
            if name == MESSAGES and name not in known:
                raise InvalidTensor(f"the model has no chat template: send '{TEXT_INPUT}' in place of '{MESSAGES}'")
            if name not in known and name not in TENSOR_NAMES:
                raise InvalidTensor(f"unknown input '{name}'; the model takes {', '.join(known)}")
        if len(found) < len(tensors):
            raise InvalidTensor("the request has two inputs with the same name: send each input once")
        return found

    def _merge_parameters(self, request: TaskRequest, inputs: Mapping[str, Tensor]) -> Mapping[str, object]:
        """Return all parameters. Request parameters override input tensors, which override `sampling_parameters`."""
        as_inputs = read_parameter_inputs(inputs)
        tensor = inputs.get(SAMPLING)
        if tensor is None:
            return {**as_inputs, **request.parameters} if as_inputs else request.parameters
        check_column(tensor, f"'{SAMPLING}' is BYTES [1], a JSON object", "object")
        try:
            given = json.loads(unpack_bytes(tensor)[0] or b"{}") if len(tensor.data) <= MAX_SAMPLING_BYTES else None
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"input '{SAMPLING}' is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise InvalidRequest(f"input '{SAMPLING}' must be a JSON object of at most {MAX_SAMPLING_BYTES} bytes")
        for name in given:
            if name not in NAMES:
                near = get_close_matches(name, NAMES, 1)
                hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(NAMES))}"
                raise InvalidRequest(f"'{SAMPLING}' has an unknown parameter '{name[:80]}'; {hint}")
        return {**given, **as_inputs, **request.parameters}

    def _read_echo(self, inputs: Mapping[str, Tensor], parameters: Mapping[str, object], prompt: str) -> bool:
        is_wanted = _read_flag_input(inputs, parameters, "echo", False)
        if EXCLUDE in inputs:
            is_wanted = not _read_flag_input(inputs, {}, EXCLUDE, True)
        if is_wanted and prompt == MESSAGES:
            raise InvalidRequest(f"'{MESSAGES}' cannot be returned with the answer: leave out 'echo'", parameter="echo")
        return is_wanted


def _read_flag_input(inputs: Mapping[str, Tensor], parameters: Mapping[str, object], name: str, default: bool) -> bool:
    if name in parameters:
        return read_flag(name, parameters[name])
    tensor = inputs.get(name)
    if tensor is None:
        return default
    if tensor.datatype != "BOOL" or tensor.shape not in ((1,), (1, 1)):
        raise InvalidTensor(f"input '{name}' must be BOOL [1]; got {tensor.datatype} {list(tensor.shape)}")
    check_tensor(tensor)
    return tensor.data[0] != 0
