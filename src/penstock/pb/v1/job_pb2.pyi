from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Header(_message.Message):
    __slots__ = ("hello", "beat", "job", "result", "cancel", "hand_back", "bye", "refused", "statistics_query", "statistics", "welcome", "probe", "probe_result", "more", "wake", "peer_hello", "forward", "session_fetch", "session_fetched", "session_given", "recall", "results", "jobs")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HAND_BACK_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_QUERY_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    PROBE_RESULT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    PEER_HELLO_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    SESSION_FETCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FETCHED_FIELD_NUMBER: _ClassVar[int]
    SESSION_GIVEN_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    beat: Beat
    job: Job
    result: Result
    cancel: Cancel
    hand_back: HandBack
    bye: Bye
    refused: Refused
    statistics_query: StatisticsQuery
    statistics: Statistics
    welcome: Welcome
    probe: Probe
    probe_result: ProbeResult
    more: More
    wake: Wake
    peer_hello: PeerHello
    forward: Forward
    session_fetch: SessionFetch
    session_fetched: SessionFetched
    session_given: SessionGiven
    recall: Recall
    results: Results
    jobs: Jobs
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., job: _Optional[_Union[Job, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., hand_back: _Optional[_Union[HandBack, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., statistics_query: _Optional[_Union[StatisticsQuery, _Mapping]] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., probe_result: _Optional[_Union[ProbeResult, _Mapping]] = ..., more: _Optional[_Union[More, _Mapping]] = ..., wake: _Optional[_Union[Wake, _Mapping]] = ..., peer_hello: _Optional[_Union[PeerHello, _Mapping]] = ..., forward: _Optional[_Union[Forward, _Mapping]] = ..., session_fetch: _Optional[_Union[SessionFetch, _Mapping]] = ..., session_fetched: _Optional[_Union[SessionFetched, _Mapping]] = ..., session_given: _Optional[_Union[SessionGiven, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ..., results: _Optional[_Union[Results, _Mapping]] = ..., jobs: _Optional[_Union[Jobs, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "worker_id", "host", "pid", "blocks", "zone", "connection", "takes_jobs")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    TAKES_JOBS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker_id: str
    host: str
    pid: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockOffer]
    zone: str
    connection: int
    takes_jobs: bool
    def __init__(self, protocol: _Optional[int] = ..., worker_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockOffer, _Mapping]]] = ..., zone: _Optional[str] = ..., connection: _Optional[int] = ..., takes_jobs: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("gateway_id", "beat_s", "beats", "credits", "takes_results")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    BEATS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    TAKES_RESULTS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    beat_s: float
    beats: str
    credits: int
    takes_results: bool
    def __init__(self, gateway_id: _Optional[str] = ..., beat_s: _Optional[float] = ..., beats: _Optional[str] = ..., credits: _Optional[int] = ..., takes_results: _Optional[bool] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("protocol", "gateway_id")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    gateway_id: str
    def __init__(self, protocol: _Optional[int] = ..., gateway_id: _Optional[str] = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("job", "model", "version", "protocol", "size_bytes", "membership", "hops", "caller")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    job: Job
    model: str
    version: str
    protocol: str
    size_bytes: int
    membership: int
    hops: int
    caller: Caller
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., protocol: _Optional[str] = ..., size_bytes: _Optional[int] = ..., membership: _Optional[int] = ..., hops: _Optional[int] = ..., caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("name", "key_id", "models", "blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    key_id: str
    models: _containers.RepeatedScalarFieldContainer[str]
    blocks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., key_id: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionFetch(_message.Message):
    __slots__ = ("query_id", "block_id", "session_id", "membership")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    block_id: str
    session_id: str
    membership: int
    def __init__(self, query_id: _Optional[int] = ..., block_id: _Optional[str] = ..., session_id: _Optional[str] = ..., membership: _Optional[int] = ...) -> None: ...

class SessionFetched(_message.Message):
    __slots__ = ("query_id", "state", "failure")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    state: SessionState
    failure: Failure
    def __init__(self, query_id: _Optional[int] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class SessionGiven(_message.Message):
    __slots__ = ("query_id", "block_id", "session_id", "state")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    block_id: str
    session_id: str
    state: SessionState
    def __init__(self, query_id: _Optional[int] = ..., block_id: _Optional[str] = ..., session_id: _Optional[str] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("life", "is_numbered", "first", "next", "arrived", "position", "has_first", "has_state", "home", "digest", "over", "answers")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    IS_NUMBERED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HAS_FIRST_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    life: int
    is_numbered: bool
    first: int
    next: int
    arrived: int
    position: int
    has_first: bool
    has_state: bool
    home: bytes
    digest: bytes
    over: str
    answers: _containers.RepeatedCompositeFieldContainer[SessionAnswer]
    def __init__(self, life: _Optional[int] = ..., is_numbered: _Optional[bool] = ..., first: _Optional[int] = ..., next: _Optional[int] = ..., arrived: _Optional[int] = ..., position: _Optional[int] = ..., has_first: _Optional[bool] = ..., has_state: _Optional[bool] = ..., home: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., over: _Optional[str] = ..., answers: _Optional[_Iterable[_Union[SessionAnswer, _Mapping]]] = ...) -> None: ...

class SessionAnswer(_message.Message):
    __slots__ = ("seq_no", "position", "results")
    SEQ_NO_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    seq_no: int
    position: int
    results: _containers.RepeatedCompositeFieldContainer[KeptResult]
    def __init__(self, seq_no: _Optional[int] = ..., position: _Optional[int] = ..., results: _Optional[_Iterable[_Union[KeptResult, _Mapping]]] = ...) -> None: ...

class KeptResult(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, parts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BlockOffer(_message.Message):
    __slots__ = ("block_id", "model", "version", "credits", "description", "weight", "is_dormant")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    IS_DORMANT_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    model: str
    version: str
    credits: int
    description: bytes
    weight: float
    is_dormant: bool
    def __init__(self, block_id: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., credits: _Optional[int] = ..., description: _Optional[bytes] = ..., weight: _Optional[float] = ..., is_dormant: _Optional[bool] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("sent_ns", "jobs", "memory_bytes", "devices")
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    sent_ns: int
    jobs: int
    memory_bytes: int
    devices: _containers.RepeatedCompositeFieldContainer[DeviceUse]
    def __init__(self, sent_ns: _Optional[int] = ..., jobs: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[DeviceUse, _Mapping]]] = ...) -> None: ...

class DeviceUse(_message.Message):
    __slots__ = ("device", "uuid", "name", "memory_bytes", "used_bytes", "busy", "worker_bytes", "blocks")
    class BlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    WORKER_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    device: str
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int
    busy: float
    worker_bytes: int
    blocks: _containers.ScalarMap[str, int]
    def __init__(self, device: _Optional[str] = ..., uuid: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., busy: _Optional[float] = ..., worker_bytes: _Optional[int] = ..., blocks: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TensorDescriptor(_message.Message):
    __slots__ = ("name", "datatype", "shape", "contents")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATATYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    datatype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    contents: bytes
    def __init__(self, name: _Optional[str] = ..., datatype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., contents: _Optional[bytes] = ...) -> None: ...

class Parameter(_message.Message):
    __slots__ = ("bool_value", "int64_value", "double_value", "string_value")
    BOOL_VALUE_FIELD_NUMBER: _ClassVar[int]
    INT64_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    bool_value: bool
    int64_value: int
    double_value: float
    string_value: str
    def __init__(self, bool_value: _Optional[bool] = ..., int64_value: _Optional[int] = ..., double_value: _Optional[float] = ..., string_value: _Optional[str] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "attempt", "block_id", "timeout_us", "inputs", "outputs", "request_id", "traceparent", "parameters", "priority", "queue_timeout_us", "session", "response_credits")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Parameter
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Parameter, _Mapping]] = ...) -> None: ...
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_CREDITS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    attempt: int
    block_id: str
    timeout_us: int
    inputs: _containers.RepeatedCompositeFieldContainer[TensorDescriptor]
    outputs: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    traceparent: str
    parameters: _containers.MessageMap[str, Parameter]
    priority: int
    queue_timeout_us: int
    session: Session
    response_credits: int
    def __init__(self, job_id: _Optional[int] = ..., attempt: _Optional[int] = ..., block_id: _Optional[str] = ..., timeout_us: _Optional[int] = ..., inputs: _Optional[_Iterable[_Union[TensorDescriptor, _Mapping]]] = ..., outputs: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., parameters: _Optional[_Mapping[str, Parameter]] = ..., priority: _Optional[int] = ..., queue_timeout_us: _Optional[int] = ..., session: _Optional[_Union[Session, _Mapping]] = ..., response_credits: _Optional[int] = ...) -> None: ...

class Jobs(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "seq_no", "is_start", "is_end", "life", "is_again")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_NO_FIELD_NUMBER: _ClassVar[int]
    IS_START_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    IS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    seq_no: int
    is_start: bool
    is_end: bool
    life: int
    is_again: bool
    def __init__(self, session_id: _Optional[str] = ..., seq_no: _Optional[int] = ..., is_start: _Optional[bool] = ..., is_end: _Optional[bool] = ..., life: _Optional[int] = ..., is_again: _Optional[bool] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("job_id", "attempt", "failure", "outputs", "queue_ns", "batch_ns", "compute_ns", "finish_ns", "batch_rows", "parameters", "is_partial")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Parameter
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Parameter, _Mapping]] = ...) -> None: ...
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    FINISH_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    IS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    attempt: int
    failure: Failure
    outputs: _containers.RepeatedCompositeFieldContainer[TensorDescriptor]
    queue_ns: int
    batch_ns: int
    compute_ns: int
    finish_ns: int
    batch_rows: int
    parameters: _containers.MessageMap[str, Parameter]
    is_partial: bool
    def __init__(self, job_id: _Optional[int] = ..., attempt: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[TensorDescriptor, _Mapping]]] = ..., queue_ns: _Optional[int] = ..., batch_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., finish_ns: _Optional[int] = ..., batch_rows: _Optional[int] = ..., parameters: _Optional[_Mapping[str, Parameter]] = ..., is_partial: _Optional[bool] = ...) -> None: ...

class Results(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[Result]
    def __init__(self, results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("probe_id", "block_id")
    PROBE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    probe_id: int
    block_id: str
    def __init__(self, probe_id: _Optional[int] = ..., block_id: _Optional[str] = ...) -> None: ...

class ProbeResult(_message.Message):
    __slots__ = ("probe_id", "block_id", "problem")
    PROBE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    probe_id: int
    block_id: str
    problem: str
    def __init__(self, probe_id: _Optional[int] = ..., block_id: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class More(_message.Message):
    __slots__ = ("job_id", "credits")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    credits: int
    def __init__(self, job_id: _Optional[int] = ..., credits: _Optional[int] = ...) -> None: ...

class Wake(_message.Message):
    __slots__ = ("block_id",)
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    def __init__(self, block_id: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("job_ids",)
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    job_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HandBack(_message.Message):
    __slots__ = ("job_ids",)
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    job_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("job_ids",)
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    job_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StatisticsQuery(_message.Message):
    __slots__ = ("query_id",)
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    def __init__(self, query_id: _Optional[int] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("query_id", "blocks")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockStatistics]
    def __init__(self, query_id: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockStatistics, _Mapping]]] = ...) -> None: ...

class Duration(_message.Message):
    __slots__ = ("count", "ns")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NS_FIELD_NUMBER: _ClassVar[int]
    count: int
    ns: int
    def __init__(self, count: _Optional[int] = ..., ns: _Optional[int] = ...) -> None: ...

class BatchStatistics(_message.Message):
    __slots__ = ("rows", "compute_input", "compute_infer", "compute_output")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INFER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    rows: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    def __init__(self, rows: _Optional[int] = ..., compute_input: _Optional[_Union[Duration, _Mapping]] = ..., compute_infer: _Optional[_Union[Duration, _Mapping]] = ..., compute_output: _Optional[_Union[Duration, _Mapping]] = ...) -> None: ...

class BlockStatistics(_message.Message):
    __slots__ = ("block_id", "model", "version", "last_inference_ms", "inference_count", "execution_count", "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "batches", "closed", "generation")
    class ClosedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_INFERENCE_MS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    FAIL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INFER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    model: str
    version: str
    last_inference_ms: int
    inference_count: int
    execution_count: int
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    batches: _containers.RepeatedCompositeFieldContainer[BatchStatistics]
    closed: _containers.ScalarMap[str, int]
    generation: GenerationStanding
    def __init__(self, block_id: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., last_inference_ms: _Optional[int] = ..., inference_count: _Optional[int] = ..., execution_count: _Optional[int] = ..., success: _Optional[_Union[Duration, _Mapping]] = ..., fail: _Optional[_Union[Duration, _Mapping]] = ..., queue: _Optional[_Union[Duration, _Mapping]] = ..., compute_input: _Optional[_Union[Duration, _Mapping]] = ..., compute_infer: _Optional[_Union[Duration, _Mapping]] = ..., compute_output: _Optional[_Union[Duration, _Mapping]] = ..., batches: _Optional[_Iterable[_Union[BatchStatistics, _Mapping]]] = ..., closed: _Optional[_Mapping[str, int]] = ..., generation: _Optional[_Union[GenerationStanding, _Mapping]] = ...) -> None: ...

class GenerationStanding(_message.Message):
    __slots__ = ("running", "waiting", "cache_blocks", "cache_blocks_used", "steps", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CACHE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    cache_blocks: int
    cache_blocks_used: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., cache_blocks: _Optional[int] = ..., cache_blocks_used: _Optional[int] = ..., steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...
