"""Block descriptions to and from their wire form, which is JSON inside an offer."""

from pydantic import TypeAdapter, ValidationError

from penstock.core.blocks import BlockDescription
from penstock.core.errors import WireError

_ADAPTER: TypeAdapter[BlockDescription] = TypeAdapter(BlockDescription)


def encode_description(block: BlockDescription) -> bytes:
    return _ADAPTER.dump_json(block)


def decode_description(data: bytes) -> BlockDescription:
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise WireError("an offer has no readable description") from error
