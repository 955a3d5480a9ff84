"""Packets of the block protocol, for Python models with `python.takes_packets`, and their form as tensors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from penstock.core.errors import EngineFailed, InvalidTensor
from penstock.core.tensors import BYTES, Array, TensorSpec

SESSION_ID, SEQ_NO, TS, DATA, METADATA, FILES = "session_id", "seq_no", "ts", "data", "metadata", "files"
ANSWER_SPECS = (TensorSpec(DATA, BYTES, (1,)), TensorSpec(METADATA, BYTES, (-1,)), TensorSpec(FILES, BYTES, (-1,)))
PACKET_SPECS = (
    TensorSpec(SESSION_ID, BYTES, (1,)),
    TensorSpec(SEQ_NO, "UINT64", (1,)),
    TensorSpec(TS, "FP64", (1,)),
    *ANSWER_SPECS,
)


@dataclass(slots=True)
class PacketFile:
    metadata: Mapping[str, Any]
    data: bytes


@dataclass(slots=True)
class Packet:
    """A packet in the form that a model receives."""

    session_id: str
    seq_no: int
    ts: float  # by the client's clock, in seconds since 1970
    data: str
    files: Sequence[PacketFile] = ()

    def json(self) -> Any:
        """Return the value of the JSON text in `data`; raise ValueError if it is not JSON."""
        return json.loads(self.data)


@dataclass(slots=True)
class PacketAnswer:
    """A model's answer to a packet: data and files. A model that sends no files may return only the data."""

    data: Any  # a text, or a value that becomes JSON
    files: Sequence[PacketFile] = field(default_factory=list)


def pack_packet(packet: Packet) -> dict[str, Array]:
    return {
        SESSION_ID: _make_bytes_array([packet.session_id]),
        SEQ_NO: np.array([packet.seq_no], np.uint64),
        TS: np.array([packet.ts], np.float64),
        **_pack_content(packet.data, packet.files),
    }


def unpack_packet(arrays: Mapping[str, Array]) -> Packet:
    """Return the packet that the tensors contain; raise InvalidTensor if they are not a valid packet."""
    try:
        return Packet(
            arrays[SESSION_ID][0].decode(),
            int(arrays[SEQ_NO][0]),
            float(arrays[TS][0]),
            arrays[DATA][0].decode(),
            unpack_files(arrays),
        )
    except ValueError as error:
        raise InvalidTensor(
            f"the inputs are not a valid packet ({error}): texts must be UTF-8, and each file needs a metadata element "
            "that is empty or JSON"
        ) from None


def unpack_files(arrays: Mapping[str, Array]) -> list[PacketFile]:
    """Return the files in the tensors of a packet or an answer."""
    pairs = zip(arrays[METADATA], arrays[FILES], strict=True)
    return [PacketFile(orjson.loads(metadata) if metadata else {}, data) for metadata, data in pairs]


def pack_answer(answer: object) -> dict[str, Array]:
    """Return the tensors of a model's answer; raise EngineFailed if the answer is not a valid packet."""
    whole = answer if isinstance(answer, PacketAnswer) else PacketAnswer(answer)
    files: Sequence[Any] = whole.files
    for file in files:
        if not (isinstance(file, PacketFile) and isinstance(file.data, bytes)):
            raise EngineFailed(
                f"infer returned a file that is a {type(file).__name__}: return PacketFile(metadata, data) with bytes",
                reason="output_mismatch",
            )
    try:
        text = whole.data if isinstance(whole.data, str) else json.dumps(whole.data)
        return _pack_content(text, whole.files)
    except (TypeError, ValueError) as error:
        raise EngineFailed(
            f"infer returned data that cannot become JSON ({error}): return a text, or a value of plain types",
            reason="output_mismatch",
        ) from None


def _pack_content(text: str, files: Sequence[PacketFile]) -> dict[str, Array]:
    return {
        DATA: _make_bytes_array([text]),
        METADATA: _make_bytes_array([orjson.dumps(file.metadata) if file.metadata else b"" for file in files]),
        FILES: _make_bytes_array([file.data for file in files]),
    }


def _make_bytes_array(values: Sequence[str | bytes]) -> Array:
    found = np.empty(len(values), dtype=object)
    found[:] = [value.encode() if isinstance(value, str) else value for value in values]
    return found
