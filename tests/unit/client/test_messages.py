"""NumPy arrays to the protocol's messages and back."""

import ml_dtypes
import numpy as np
import pytest

from penstock.client import messages
from penstock.core.errors import InternalError, InvalidRequest, InvalidTensor
from penstock.core.tensors import NUMPY_TYPES, Array
from penstock.pb.inference import grpc_service_pb2 as pb


def encode(array: Array) -> pb.ModelInferRequest:
    return messages.encode_call("m", {"x": array}, [], "", {}, {})


def echo(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    outputs = [
        pb.ModelInferResponse.InferOutputTensor(name=i.name, datatype=i.datatype, shape=i.shape) for i in request.inputs
    ]
    return pb.ModelInferResponse(outputs=outputs, raw_output_contents=request.raw_input_contents)


def there_and_back(array: Array) -> Array:
    request = encode(array)
    return messages.decode_outputs(echo(request))["x"]


@pytest.mark.parametrize("datatype", sorted(NUMPY_TYPES))
def test_every_datatype_round_trips(datatype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]], dtype=NUMPY_TYPES[datatype])
    back = there_and_back(array)
    assert back.dtype == array.dtype
    assert back.tolist() == array.tolist()


def test_bf16_keeps_its_name() -> None:
    request = encode(np.zeros(2, ml_dtypes.bfloat16))
    assert request.inputs[0].datatype == "BF16"


def test_bytes_are_object_arrays_of_bytes() -> None:
    back = there_and_back(np.array([["é", b"\0\xff"], ["", b"x"]], dtype=object))
    assert back.tolist() == [["é".encode(), b"\0\xff"], [b"", b"x"]]


def test_arrays_need_not_be_contiguous_native_or_of_any_rank() -> None:
    wide = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert there_and_back(wide.T).tolist() == wide.T.tolist()
    assert there_and_back(wide.astype(">f4")).tolist() == wide.tolist()
    assert there_and_back(np.array(7, dtype=np.int64)).shape == ()
    assert there_and_back(np.empty((0, 3), np.float32)).shape == (0, 3)


def test_object_arrays_hold_bytes_or_text_only() -> None:
    with pytest.raises(InvalidTensor, match="bytes or str"):
        encode(np.array([1, "a"], dtype=object))


def test_a_dtype_that_no_datatype_carries_is_refused() -> None:
    with pytest.raises(InvalidTensor, match="complex"):
        encode(np.zeros(1, complex))


def test_the_request_contains_everything_that_the_call_specifies() -> None:
    parameters: dict[str, bool | int | float | str] = {"flag": True, "count": 3, "ratio": 0.5, "word": "w"}
    request = messages.encode_call("m", {"x": np.zeros(1)}, ["y"], "2", parameters, {})
    assert (request.model_name, request.model_version, [o.name for o in request.outputs]) == ("m", "2", ["y"])
    sent = {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in request.parameters.items()}
    assert sent == parameters
    assert request.parameters["flag"].WhichOneof("parameter_choice") == "bool_param"


def test_a_parameter_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'p' is a list"):
        messages.encode_call("m", {}, [], "", {"p": []}, {})  # type: ignore[dict-item]


def test_invalid_answers_of_a_server_are_reported() -> None:
    short = pb.ModelInferResponse(
        outputs=[pb.ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=[2])],
        raw_output_contents=[b"\0" * 4],
    )
    with pytest.raises(InternalError, match="cannot be read"):
        messages.decode_outputs(short)
    del short.raw_output_contents[:]
    with pytest.raises(InternalError, match="without raw"):
        messages.decode_outputs(short)


def test_the_error_for_a_missing_output_names_the_existing_ones() -> None:
    with pytest.raises(InvalidRequest, match="returned y, but no 'embedding'"):
        messages.pick_output({"y": np.zeros(1)}, "embedding", "m")
