"""The inputs and parameters of a packet's request, made from its data and its files when the block is known."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.controls import ORDER_PARAMETERS, SEQ_NO, SESSION_ID
from penstock.core.errors import InvalidRequest, InvalidTensor, ModelNotReady
from penstock.core.packets import Packet, PacketFile, pack_packet
from penstock.core.requests import InferRequest, Parameter
from penstock.core.settings import GENERATE
from penstock.core.tensors import BYTES, ITEM_SIZES, Tensor, TensorSpec, check_tensor, from_array, pack_bytes
from penstock.endpoints.json_size import check_json_nesting, check_json_size
from penstock.endpoints.large_messages import LARGE_BYTES
from penstock.gateway.blocks.packet import MAX_SHOWN_CHARS, BlockPacket, parse_text
from penstock.gateway.oip.json_tensors import check_shape, fill_shape, is_structured
from penstock.gateway.oip.rest_codec import check_counts, decode_parameters
from penstock.gateway.v1.v1_codec import B64, find_spec, make_tensor

INPUTS, PARAMETERS = "inputs", "parameters"
MODE, ASYNC = "mode", "async"  # the key of data that asks for an asynchronous request
MESSAGES = "messages"  # the input of a chat
INPUT, SHAPE = "input", "shape"  # keys of a file's metadata: the input that the file is for, and its shape
# Parameters that are ignored in the data, because the packet has its own fields for them.
PACKET_PARAMETERS = frozenset({SESSION_ID, *ORDER_PARAMETERS})
MAX_ORDERED_SEQ_NO = 2**63 - 1


class PacketInputs:
    """Makes the inputs of a packet's request, as an InputBinder; binding the request to a block sets `block`."""

    def __init__(self, packet: BlockPacket, limits: Limits) -> None:
        self.packet = packet
        self.block: BlockDescription | None = None
        self._limits = limits
        self._values: dict[str, Any] | None = None
        self._specs: tuple[TensorSpec, ...] | None = None  # of the block that the tensors are made for
        self._tensors: list[Tensor] = []
        self._parameters: dict[str, Parameter] = {}

    @property
    def is_async(self) -> bool:
        """Return whether the packet requests an asynchronous answer; False if its data is not a JSON object."""
        data = self.packet.fields.data
        if self.packet.is_async:
            return True
        if not (b'"mode"' in data and b'"async"' in data):
            return False
        try:
            return bool(self.values.get(MODE) == ASYNC)
        except InvalidRequest:
            return False

    @property
    def is_chat(self) -> bool:
        return any(tensor.name == MESSAGES for tensor in self._tensors)

    @property
    def values(self) -> dict[str, Any]:
        """Return the JSON object in the packet's data; no data is an empty object."""
        if self._values is None:
            data = self.packet.fields.data
            if len(data) > LARGE_BYTES:
                check_json_size(data, self._limits)
            values = parse_text("data", data) if data.strip() else {}
            check_json_nesting(data, values)
            self._values = values
        return self._values

    def prepare(self, block: BlockDescription) -> None:
        """Make the tensors and parameters for a block. Call this in a thread if the data is large."""
        if self._specs is block.inputs:
            return
        if not block.is_described:
            raise ModelNotReady(f"model '{block.model}' is being loaded; send the packet again")
        if block.settings.takes_packets:
            self._tensors, self._parameters = self._make_packet_tensors(), {}
        else:
            self._convert_values(block)
        self._specs = block.inputs

    def bind(self, request: InferRequest, block: BlockDescription) -> None:
        self.prepare(block)
        fields = self.packet.fields
        request.inputs = self._tensors
        request.parameters = {**self._parameters, SESSION_ID: fields.session_id}
        if block.settings.sessions.is_ordered and fields.seq_no:
            if fields.seq_no > MAX_ORDERED_SEQ_NO:
                raise InvalidRequest(
                    f"'seq_no' is {fields.seq_no}; it must be at most 2^63 - 1, because the sessions of model "
                    f"'{block.model}' are ordered",
                    parameter=SEQ_NO,
                )
            request.parameters[SEQ_NO] = fields.seq_no
        self.block = block

    def _make_packet_tensors(self) -> list[Tensor]:
        """Return the tensors for a Python model that receives the whole packet."""
        fields = self.packet.fields
        packet = Packet(fields.session_id, fields.seq_no, fields.ts, fields.data.decode(), self.packet.files)
        return [from_array(name, array) for name, array in pack_packet(packet).items()]

    def _convert_values(self, block: BlockDescription) -> None:
        specs = {spec.name: spec for spec in block.inputs}
        inputs, parameters = _separate_inputs(self.values, specs)
        check_counts({PARAMETERS: parameters}, self._limits)
        tensors = {name: _to_tensor(find_spec(specs, name), value) for name, value in inputs.items()}
        tensors |= _make_file_tensors(self.packet.files, specs, tensors, block)
        missing = [spec.name for spec in block.inputs if not spec.is_optional and spec.name not in tensors]
        if missing and not (block.settings.task == GENERATE and tensors):
            raise _create_missing_input_error(block, missing[0], [*parameters])
        self._tensors, self._parameters = list(tensors.values()), decode_parameters(parameters)


def _separate_inputs(
    values: Mapping[str, Any], specs: Mapping[str, TensorSpec]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs and the parameters in a packet's data. A key that is the name of an input sets that input."""
    inputs: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or (name == MODE and value == ASYNC):
            continue
        if name in specs:
            _put_once(inputs, name, value)
        elif name in (INPUTS, PARAMETERS):
            if type(value) is not dict:
                raise InvalidRequest(f"'{name}' of 'data' must be an object", parameter=name)
            for each, content in value.items():
                if content is not None:
                    _put_once(inputs if name == INPUTS else parameters, each, content)
        else:
            _put_once(parameters, name, value)
    plain = {name: _to_parameter(value) for name, value in parameters.items() if name not in PACKET_PARAMETERS}
    return inputs, plain


def _put_once(inputs: dict[str, Any], name: str, value: Any) -> None:
    if name in inputs:
        raise InvalidRequest(f"'{name[:MAX_SHOWN_CHARS]}' is given twice in 'data': send it once")
    inputs[name] = value


def _to_parameter(value: Any) -> Any:
    return orjson.dumps(value).decode() if isinstance(value, list | dict) else value


def _to_tensor(spec: TensorSpec, value: Any) -> Tensor:
    if spec.datatype == BYTES and is_structured(value) and not _is_base64(value):
        # For example the messages of a chat, which are one element.
        return Tensor(spec.name, BYTES, fill_shape(spec, 1), pack_bytes([orjson.dumps(value)]))
    return make_tensor(spec, value)


def _is_base64(value: Any) -> bool:
    """Return whether a value is bytes in base64, or a list with such values: {"b64": …}."""
    if isinstance(value, list):
        return any(_is_base64(each) for each in value if isinstance(each, dict))
    return isinstance(value, dict) and value.keys() == {B64}


# --- files


def _make_file_tensors(
    files: Sequence[PacketFile],
    specs: Mapping[str, TensorSpec],
    tensors_from_data: Mapping[str, Tensor],
    block: BlockDescription,
) -> dict[str, Tensor]:
    """Return the inputs that files carry. A file goes to the input in its metadata, or to the next free BYTES input."""
    by_input: dict[str, list[PacketFile]] = {}
    unnamed: list[PacketFile] = []
    for file in files:
        name = file.metadata.get(INPUT)
        if name is None:
            unnamed.append(file)
        elif not isinstance(name, str) or name not in specs:
            raise InvalidTensor(
                f"a file's metadata names the unknown input {str(name)[:MAX_SHOWN_CHARS]!r}: use {', '.join(specs)}"
            )
        else:
            by_input.setdefault(name, []).append(file)
    if unnamed:
        free = [
            name
            for name in specs
            if specs[name].datatype == BYTES and name not in tensors_from_data.keys() | by_input.keys()
        ]
        by_input |= _assign_files(unnamed, [name for name in free if not specs[name].is_optional] or free, block)
    if twice := by_input.keys() & tensors_from_data.keys():
        raise InvalidTensor(f"input '{min(twice)}' is given in 'data' and by a file: send it once")
    return {name: _make_file_tensor(specs[name], found) for name, found in by_input.items()}


def _assign_files(files: list[PacketFile], inputs: list[str], block: BlockDescription) -> dict[str, list[PacketFile]]:
    if len(inputs) == 1:
        return {inputs[0]: files}
    if len(inputs) == len(files):
        return {name: [file] for name, file in zip(inputs, files, strict=True)}
    if not inputs:
        raise InvalidTensor(
            f"the packet has {len(files)} files, but model '{block.model}' has no input for files: send none"
        )
    raise InvalidTensor(
        f"the packet has {len(files)} files for the inputs {', '.join(inputs)}: name the input of each in its "
        f'metadata, for example {{"{INPUT}": "{inputs[0]}"}}'
    )


def _make_file_tensor(spec: TensorSpec, files: list[PacketFile]) -> Tensor:
    if spec.datatype == BYTES:
        return Tensor(spec.name, BYTES, fill_shape(spec, len(files)), pack_bytes([file.data for file in files]))
    if len(files) != 1:
        raise InvalidTensor(f"input '{spec.name}' is {spec.datatype} and takes one file, not {len(files)}")
    (file,) = files
    if SHAPE in file.metadata:
        shape = check_shape(spec.name, file.metadata[SHAPE])
    else:
        shape = fill_shape(spec, len(file.data) // ITEM_SIZES[spec.datatype])
    tensor = Tensor(spec.name, spec.datatype, shape, file.data)
    check_tensor(tensor)
    return tensor


def _create_missing_input_error(block: BlockDescription, name: str, others: Sequence[str]) -> InvalidTensor:
    sent = ", ".join(repr(each[:MAX_SHOWN_CHARS]) for each in others[:4])
    has = f"; 'data' has {sent}, which are not inputs" if sent else ""
    return InvalidTensor(
        f"the packet has no input '{name}' for model '{block.model}' (task {block.settings.task}){has}: send it as a "
        "key of 'data', or BYTES as a file"
    )
