"""The schemas of packets in JSON, which also validate request bodies."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from penstock.core.controls import MAX_SESSION_ID
from penstock.endpoints.http.schemas import Name
from penstock.gateway.blocks.packet import MAX_SEQ_NO


def _check_json_text(value: Any) -> Any:
    if not isinstance(value, dict | str):
        raise ValueError("must be a JSON object, or the same as text")
    return value


def _check_seq_no(value: Any) -> Any:
    if type(value) is not int or not 0 <= value <= MAX_SEQ_NO:
        raise ValueError("must be a whole number from 0 to 2^64 - 1")
    return value


JsonText = Annotated[dict[str, Any] | str, BeforeValidator(_check_json_text)]
SeqNo = Annotated[int, Field(ge=0, le=MAX_SEQ_NO), BeforeValidator(_check_seq_no)]


class PacketBodyFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    metadata: JsonText | None = None
    file_data: str | bytes = Field(description="The content in base64")


class PacketBody(BaseModel):
    """A packet. The field names `query_parameters` and `output_ptr` of the gRPC message are also accepted."""

    model_config = ConfigDict(strict=True, extra="forbid")

    block_id: Name | None = Field(None, description="A block id or a model's name; or give `model`")
    model: Name | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID)]
    seq_no: SeqNo = 0
    ts: float = Field(0.0, description="Seconds since 1970 (default: the time of arrival)")
    data: JsonText | None = Field(None, description="The input; docs/packets.md shows the data of each task")
    selection_query: JsonText | None = Field(
        None,
        description="A search query that selects the block",
        validation_alias=AliasChoices("selection_query", "query_parameters"),
    )
    graph: JsonText | None = Field(
        None, description="A graph of blocks", validation_alias=AliasChoices("graph", "output_ptr")
    )
    frame_ptr: JsonText | None = Field(None, description="Names a stored object")
    files: list[PacketBodyFile] = []
    mode: Literal["async", "sync"] = Field("sync", description="async: answer 202 with the id of the request")


class PacketAnswerFile(BaseModel):
    metadata: dict[str, Any]
    file_data: str = Field(description="The content in base64")


class PacketAnswerBody(BaseModel):
    session_id: str
    seq_no: int
    ts: float
    data: Any = Field(description="The block's answer; a text if it is not JSON")
    files: list[PacketAnswerFile]
