"""The answer to a packet: its data as JSON, and its files, made from the outputs of the block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.packets import DATA, PacketFile, unpack_files
from penstock.core.requests import InferResponse
from penstock.core.tensors import BYTES, Tensor, to_array, unpack_bytes
from penstock.gateway.v1.v1_codec import to_plain_value

OUTPUTS, PARAMETERS = "outputs", "parameters"
OUTPUT, INDEX = "output", "index"  # keys of a file's metadata: the output that it is an element of
TENSOR, UPSCALE = "tensor", "upscale"  # tasks
MESSAGES = "messages"
CHAT_OUTPUTS = ("text_output", "finish_reason", "usage")


@dataclass(slots=True)
class AnswerParts:
    """The data and the files of the answer to a packet. `data` is JSON, or any text that a Python model returned."""

    data: bytes
    files: Sequence[PacketFile] = field(default_factory=list)
    is_json: bool = True  # False: unknown, because a Python model returned the text


def make_answer_parts(
    response: InferResponse, block: BlockDescription, packet_files: Sequence[PacketFile], is_chat: bool, limits: Limits
) -> AnswerParts:
    """Return the answer to a packet. `packet_files`: the packet's files. `is_chat`: the packet had messages."""
    if block.settings.takes_packets:
        arrays = {tensor.name: to_array(tensor) for tensor in response.outputs}
        return AnswerParts(arrays[DATA][0], unpack_files(arrays), is_json=False)
    values: dict[str, Any] = {}
    files: list[PacketFile] = []
    for tensor in response.outputs:
        if _is_for_files(tensor, block, limits):
            files += _make_files(tensor, packet_files)
        else:
            values[tensor.name] = to_plain_value(tensor, limits.max_values)
    if is_chat and values.keys() >= set(CHAT_OUTPUTS):
        values = _make_chat_answer(values)
    content = {OUTPUTS: values} if block.settings.task == TENSOR else values
    if response.parameters:
        content[PARAMETERS] = response.parameters
    return AnswerParts(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), files)


def _is_for_files(tensor: Tensor, block: BlockDescription, limits: Limits) -> bool:
    """Return whether an output is sent as files: if it is an image, not UTF-8, too long, or has infinities."""
    if tensor.datatype != BYTES:
        if prod(tensor.shape) > limits.max_values:
            return True
        array = to_array(tensor)
        return array.dtype.kind not in "biu" and bool(np.isinf(array).any())
    if block.settings.task == UPSCALE:
        return True
    try:
        for element in unpack_bytes(tensor):
            element.decode()
    except UnicodeDecodeError:
        return True
    return False


def _make_files(tensor: Tensor, packet_files: Sequence[PacketFile]) -> list[PacketFile]:
    """Return a file for each element of a BYTES output, or one file with the bytes of a numeric output.

    If the packet had the same number of files, each file also gets the metadata of the packet's file at its index.
    """
    if tensor.datatype != BYTES:
        kind = {OUTPUT: tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        return [PacketFile(kind, bytes(tensor.data))]
    elements = unpack_bytes(tensor)
    kept: Sequence[Mapping[str, Any]] = (
        [file.metadata for file in packet_files] if len(packet_files) == len(elements) else ()
    )
    return [
        PacketFile({**(kept[index] if kept else {}), OUTPUT: tensor.name, INDEX: index}, element)
        for index, element in enumerate(elements)
    ]


def _make_chat_answer(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's answer in the form of its request: messages of the assistant, one per choice."""
    texts, reasons, usage = (values[name] for name in CHAT_OUTPUTS)
    prompt, completion = int(usage[0]), int(usage[1])
    return {
        MESSAGES: [{"role": "assistant", "content": text} for text in texts],
        "finish_reason": reasons,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }
