"""Large packets are bounded before they are parsed."""

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, Overloaded, PenstockError, RequestTooLarge
from penstock.endpoints.large_messages import HUGE_BYTES, LARGE_BYTES
from penstock.gateway.blocks.block_grpc import create_packet_reader
from penstock.pb.blocks import inference_pb2 as pb
from penstock.serving.admission import Admission

EMPTY_FILE, NO_METADATA = b"\x4a\x00", b"\x0a\x00"


class SmallLimits(Limits):
    max_rows: int = 10


def read(data: bytes) -> pb.BlockInferencePacket | bytes | PenstockError:
    limits = SmallLimits()
    return create_packet_reader(limits, Admission(limits))(data)


def large(*sizes: int) -> bytes:
    files = [pb.FileInfo(file_data=bytes(size)) for size in sizes]
    return pb.BlockInferencePacket(block_id="b", files=files).SerializeToString()


def test_large_packets_are_parsed_and_huge_ones_left_to_a_thread() -> None:
    small = read(large(LARGE_BYTES))
    assert isinstance(small, pb.BlockInferencePacket)
    assert len(small.files[0].file_data) == LARGE_BYTES
    data = large(HUGE_BYTES)
    assert read(data) is data


def test_too_many_files_or_fields_are_refused_unparsed() -> None:
    assert isinstance(read(large(LARGE_BYTES) + 10 * EMPTY_FILE), RequestTooLarge)
    assert isinstance(read(LARGE_BYTES * EMPTY_FILE), RequestTooLarge)
    file = pb.FileInfo(file_data=bytes(LARGE_BYTES)).SerializeToString() + 100 * NO_METADATA
    packet = pb.BlockInferencePacket()
    packet.files.add().MergeFromString(file)
    field = bytes([0x4A, *[len(file) & 127 | 128, len(file) >> 7 & 127 | 128, len(file) >> 14]])
    assert isinstance(read(field + file), RequestTooLarge)


def test_a_message_that_is_not_a_packet_is_refused() -> None:
    for data in (b"\xff", b"\xff" * (LARGE_BYTES + 1), large(LARGE_BYTES)[:-1]):
        error = read(data)
        assert isinstance(error, InvalidRequest)
        assert error.message == "the message is not a BlockInferencePacket"


def test_a_large_packet_needs_room() -> None:
    limits = Limits(max_inflight_bytes=1024)
    admission = Admission(limits)
    assert isinstance(create_packet_reader(limits, admission)(large(2 * HUGE_BYTES)), Overloaded)
