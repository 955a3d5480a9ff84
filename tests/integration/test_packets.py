"""The block protocol on a real server: packets for every task, in both directions, over gRPC and REST."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import skimage.data
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from PIL import Image

from benchmarks.server import ServerProcess
from penstock.engines.onnx.bert_file import find_minilm_weights
from penstock.models.importing import import_checkpoint
from penstock.pb.blocks import inference_pb2 as pb
from penstock.pb.blocks.inference_pb2_grpc import BlockInferenceServiceStub
from tests.digits import GRAY, png, train_classifier, write_digits
from tests.servers import ROOT, write_add_sub, write_identity

WAIT_S = 120.0
COUNT = 2**64 - 1  # the largest seq_no
PAGE = ROOT / "docs/packets.md"
EXAMPLES = re.findall(r"^```sh\n(curl.*?)^```\n\n```json\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
PHOTO = ROOT / "src/penstock/models/samples/data/photos/dogs.jpg"
WHOLE = """
import hashlib

from penstock.core.packets import PacketAnswer, PacketFile


class Model:
    def infer(self, packet, context):
        found = {
            "asked": packet.json() if packet.data else None,
            "session": [packet.session_id, context.session_id],
            "seq_no": packet.seq_no,
            "ts": packet.ts,
            "names": [file.metadata.get("file_name") for file in packet.files],
        }
        digests = [hashlib.sha256(file.data).digest() for file in packet.files]
        return PacketAnswer(found, [PacketFile({"of": index}, digest) for index, digest in enumerate(digests)])
"""


ECHO = """
class Model:
    def infer(self, inputs, context):
        return {"y": inputs["x"]}
"""
BYTES_TENSORS = "inputs: [{name: x, datatype: BYTES, shape: [-1]}], outputs: [{name: y, datatype: BYTES, shape: [-1]}]"


def write_python(repository: Path, name: str, source: str, options: str) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(source)
    (folder.parent / "model.yaml").write_text(f"engine: python\npython: {{{options}}}\ninstances: {{count: 1}}\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("packets")
    models = folder / "models"
    models.mkdir()
    for name in ("minilm", "srcnn", "smollm2"):
        (models / name).symlink_to(ROOT / "models" / name)
    import_checkpoint(find_minilm_weights(), models / "minilm-score", "score", "onnx")
    write_digits(models, "digits", ["n", 1, 8, 8], f"{GRAY}instances: {{count: 1}}\n")
    write_add_sub(models, "add-sub")
    write_python(models, "bytes", ECHO, BYTES_TENSORS)
    write_identity(models, "ordered", "FP32", "sessions: {order: true}\n")
    write_python(models, "whole", WHOLE, "takes_packets: true")
    (documented,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    write_python(models, "counter", documented, "takes_packets: true")
    (models / "faces").symlink_to(ROOT / "examples/global/models/faces")
    with ServerProcess(models, folder / "server", "--gateways", "2") as running:
        yield running


@pytest.fixture(scope="module")
def stub(server: ServerProcess) -> Iterator[BlockInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc, [("grpc.max_receive_message_length", -1)]) as channel:
        yield BlockInferenceServiceStub(channel)


def packet(block: str, data: Any = None, *files: bytes, **fields: Any) -> pb.BlockInferencePacket:
    text = data if isinstance(data, str) else "" if data is None else json.dumps(data)
    fields.setdefault("session_id", "sess-12345")
    carried = [pb.FileInfo(file_data=file) for file in files]
    return pb.BlockInferencePacket(block_id=block, data=text, files=carried, **fields)


def ask(stub: BlockInferenceServiceStub, *given: Any, **fields: Any) -> tuple[Any, pb.AIOSPacket]:
    answer = stub.infer(packet(*given, **fields), timeout=WAIT_S)
    return json.loads(answer.data), answer


def test_texts_become_embeddings_and_scores(stub: BlockInferenceServiceStub) -> None:
    found, answer = ask(stub, "minilm", {"text": ["The river rises.", "A cow."]}, seq_no=COUNT)
    assert np.array(found["embedding"]).shape == (2, 384)
    assert (answer.session_id, answer.seq_no, len(answer.files)) == ("sess-12345", COUNT, 0)
    assert found["parameters"]["tokens"] > 4
    as_file, _ = ask(stub, "minilm", None, b"The river rises.")
    np.testing.assert_allclose(as_file["embedding"][0], found["embedding"][0], atol=1e-5)
    scores, _ = ask(stub, "minilm-score", {"query": "what eats grass?", "passage": ["A wolf hunts.", "A cow grazes."]})
    assert scores["score"][1][0] > scores["score"][0][0]


def test_images_are_sent_and_returned_as_files(stub: BlockInferenceServiceStub) -> None:
    _, images, _ = train_classifier()
    found, _ = ask(stub, "digits", {"top_k": 2}, png(images[0]), png(images[1]))
    assert np.array(found["label"]).shape == np.array(found["score"]).shape == (2, 2)
    found, answer = ask(stub, "srcnn", {"format": "png"}, PHOTO.read_bytes())
    (file,) = answer.files
    assert file.file_data.startswith(b"\x89PNG")
    assert json.loads(file.metadata) == {"output": "image", "index": 0}


def test_a_chat_is_answered_with_messages(stub: BlockInferenceServiceStub) -> None:
    chat = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "temperature": 0}
    found, _ = ask(stub, "smollm2", chat)
    (message,) = found["messages"]
    assert message["role"] == "assistant"
    assert message["content"]
    assert found["usage"]["completion_tokens"] <= 8
    plain, _ = ask(stub, "smollm2", {"text_input": "Water boils at", "max_tokens": 4})
    assert plain["text_output"][0]


def test_tensors_are_numbers_in_json(stub: BlockInferenceServiceStub) -> None:
    found, _ = ask(stub, "add-sub", {"inputs": {"a": [[1, 2, 3, 4]], "b": [[1, 1, 1, 1]]}})
    assert found == {"outputs": {"sum": [[2, 3, 4, 5]], "difference": [[0, 1, 2, 3]]}}
    raw = np.arange(4, dtype=np.int32)
    named = pb.FileInfo(metadata='{"input": "a", "shape": [1, 4]}', file_data=raw.tobytes())
    message = packet("add-sub", {"b": [[0, 0, 0, 0]]})
    message.files.append(named)
    assert json.loads(stub.infer(message).data)["outputs"]["sum"] == [[0, 1, 2, 3]]


def test_binary_outputs_are_returned_as_files(stub: BlockInferenceServiceStub) -> None:
    found, answer = ask(stub, "bytes", {"x": ["text"]})
    assert found == {"outputs": {"y": ["text"]}}
    found, answer = ask(stub, "bytes", None, b"\xff\xfe")
    assert found == {"outputs": {}}
    assert answer.files[0].file_data == b"\xff\xfe"


def test_a_model_can_receive_the_whole_packet(stub: BlockInferenceServiceStub) -> None:
    message = packet("whole", {"free": ["form", 1]}, seq_no=COUNT, ts=12.5)
    message.files.add(metadata='{"file_name": "a.bin"}', file_data=b"\x00\xff")
    answer = stub.infer(message)
    assert json.loads(answer.data) == {
        "asked": {"free": ["form", 1]},
        "session": ["sess-12345", "sess-12345"],
        "seq_no": COUNT,
        "ts": 12.5,
        "names": ["a.bin"],
    }
    assert [(json.loads(file.metadata), len(file.file_data)) for file in answer.files] == [({"of": 0}, 32)]


def test_a_client_may_name_the_request(stub: BlockInferenceServiceStub) -> None:
    message = packet("add-sub", {"a": [[0] * 4], "b": [[0] * 4]})
    for given in ((), (("x-request-id", "mine"),)):
        _, call = stub.infer.with_call(message, timeout=WAIT_S, metadata=given)
        found = dict(call.trailing_metadata())["x-request-id"]
        assert found == "mine" if given else len(found) == 32
    with pytest.raises(grpc.RpcError) as refused:
        stub.infer(message, timeout=WAIT_S, metadata=(("x-request-id", "m e"),))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_setting_of_the_block_decides_whether_requests_are_ordered(stub: BlockInferenceServiceStub) -> None:
    fields = {"session_id": "in-order", "data": {"x": [[1.0]]}}
    for number in (1, 2):
        found, answer = ask(stub, "ordered", seq_no=number, **fields)
        assert (found["outputs"]["y"], answer.seq_no) == ([[1.0]], number)
    with pytest.raises(grpc.RpcError) as refused:
        ask(stub, "ordered", seq_no=COUNT, **fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    found, answer = ask(stub, "add-sub", {"a": [[0] * 4], "b": [[0] * 4]}, session_id="in-order", seq_no=1)
    again, _ = ask(stub, "add-sub", {"a": [[1] * 4], "b": [[0] * 4]}, session_id="in-order", seq_no=1)
    assert again != found


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"session_id": ""}, "INVALID_ARGUMENT", "'session_id' is required"),
        ({"session_id": "s" * 257}, "INVALID_ARGUMENT", "257 characters"),
        ({"block": ""}, "INVALID_ARGUMENT", "'block_id' is required"),
        ({"block": "absent"}, "NOT_FOUND", "unknown model 'absent'"),
        ({"data": "no json"}, "INVALID_ARGUMENT", "'data' is not JSON"),
        ({"data": "[1]"}, "INVALID_ARGUMENT", "it must be a JSON object"),
        ({"data": '{"c": 1}'}, "INVALID_ARGUMENT", "no input 'a'"),
        ({"data": '{"a": "text", "b": 1}'}, "INVALID_ARGUMENT", "input 'a'"),
        ({"ts": float("nan")}, "INVALID_ARGUMENT", "'ts' is nan"),
        ({"frame_ptr": b"\xff"}, "INVALID_ARGUMENT", "'frame_ptr' is not JSON"),
        ({"frame_ptr": b'{"key": "k"}'}, "INVALID_ARGUMENT", "'frame_ptr' needs 'framedb_id'"),
        ({"frame_ptr": b'{"framedb_id": "f", "key": "k"}'}, "INVALID_ARGUMENT", "no frame stores"),
        ({"output_ptr": "["}, "INVALID_ARGUMENT", "'output_ptr' is not JSON"),
        ({"output_ptr": '{"graph": {"add-sub": ["b"], "b": []}}'}, "INVALID_ARGUMENT", "a graph of 2 blocks"),
        ({"output_ptr": '{"minilm": []}'}, "INVALID_ARGUMENT", "name the same block"),
        ({"query_parameters": "{"}, "INVALID_ARGUMENT", "'query_parameters' is not JSON"),
        ({"files": [pb.FileInfo(metadata="{")]}, "INVALID_ARGUMENT", "'files.0.metadata' is not JSON"),
    ],
)
def test_failures_are_statuses_with_a_reason(
    stub: BlockInferenceServiceStub, fields: dict[str, Any], code: str, text: str
) -> None:
    given: dict[str, Any] = {"session_id": "s", "data": '{"a": [[0, 0, 0, 0]], "b": [[0, 0, 0, 0]]}'} | fields
    message = pb.BlockInferencePacket(block_id=given.pop("block", "add-sub"), **given)
    with pytest.raises(grpc.RpcError) as refused:
        stub.infer(message, timeout=WAIT_S)
    assert (refused.value.code().name, text in refused.value.details()) == (code, True), refused.value.details()


@pytest.mark.parametrize("graph", ["", "{}", '{"add-sub": []}', '{"graph": {"add-sub": {"outputs": []}}, "other": 1}'])
def test_a_graph_of_one_block_is_a_plain_request(stub: BlockInferenceServiceStub, graph: str) -> None:
    found, _ = ask(stub, "add-sub", {"a": [[2] * 4], "b": [[2] * 4]}, output_ptr=graph)
    assert found["outputs"]["sum"] == [[4] * 4]


def kinds(value: Any) -> Any:
    """Return the form of a JSON value: its keys, and the form of the first element of each list."""
    if isinstance(value, dict):
        return {key: kinds(each) for key, each in value.items()}
    if isinstance(value, list):
        return [kinds(each) for each in value[:1]]
    return type(value).__name__


@pytest.mark.parametrize(("command", "answer"), EXAMPLES)
def test_the_examples_of_the_page_answer_as_documented(
    server: ServerProcess, tmp_path: Path, command: str, answer: str
) -> None:
    _, images, _ = train_classifier()
    (tmp_path / "seven.png").write_bytes(png(images[0]))
    (tmp_path / "src").symlink_to(ROOT / "src")
    shell = command.replace("localhost:8080", server.http_url)
    run = ["bash", "-c", shell]
    ran = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=True)
    found = json.loads(ran.stdout)
    assert kinds(found) == kinds(json.loads(answer)), ran.stdout[:2000]


def test_every_task_has_an_example() -> None:
    assert len(EXAMPLES) == 7


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.http_url}{path}", timeout=WAIT_S, **body)


def test_rest_packets_carry_the_largest_number_and_text(server: ServerProcess) -> None:
    body = {"model": "whole", "session_id": "é", "seq_no": COUNT, "ts": 1.5, "data": '{"a": 1}'}
    found = post(server, "/v1/infer", json=body).json()
    assert (found["session_id"], found["seq_no"]) == ("é", COUNT)
    assert found["data"] == {"asked": {"a": 1}, "session": ["é", "é"], "seq_no": COUNT, "ts": 1.5, "names": []}


def test_a_form_pairs_metadata_with_files(server: ServerProcess) -> None:
    fields = {"block_id": "whole", "session_id": "s", "seq_no": str(COUNT), "data": ""}
    fields |= {"a_metadata": '{"file_name": "one"}'}
    files = [("a", ("x", b"1")), ("b", ("y", b"2")), ("c", ("z", b"3")), ("c_metadata", ("m", b'{"file_name": "z"}'))]
    found = post(server, "/v1/infer-multipart", data=fields, files=files).json()
    assert (found["data"]["names"], found["seq_no"]) == (["one", None, "z"], COUNT)
    assert [file["metadata"] for file in found["files"]] == [{"of": 0}, {"of": 1}, {"of": 2}]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"session_id": ""}, 400, "session_id"),
        ({"session_id": "s"}, 400, "'block_id' is required"),
        ({"block_id": "add-sub"}, 400, "session_id"),
        ({"block_id": "add-sub", "model": "minilm", "session_id": "s"}, 400, "different blocks"),
        ({"block_id": "add-sub", "session_id": "s", "seq_no": 2**64}, 400, "'seq_no': must be a whole number from 0"),
        ({"block_id": "add-sub", "session_id": "s", "seq_no": -1}, 400, "'seq_no': must be a whole number from 0"),
        ({"block_id": "add-sub", "session_id": "s", "data": [1]}, 400, "'data': must be a JSON object, or the same"),
        ({"block_id": "add-sub", "session_id": "s", "color": "red"}, 400, "'color': is unknown"),
        ({"block_id": "add-sub", "session_id": "s", "files": [{"file_data": "", "name": "a"}]}, 400, "files.0.name"),
        ({"block_id": "add-sub", "session_id": "s", "graph": {"graph": {"a": ["b"]}}}, 400, "a graph of 2 blocks"),
        ({"block_id": "add-sub", "session_id": "s", "files": [{"file_data": "?"}]}, 400, "is not base64"),
        ({"block_id": "absent", "session_id": "s", "data": {}}, 404, "unknown model 'absent'"),
        ({"model": "add-sub"}, 400, "inputs"),
    ],
)
def test_rest_refuses_invalid_packets(server: ServerProcess, body: dict[str, Any], status: int, text: str) -> None:
    answer = post(server, "/v1/infer", json=body)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text


@pytest.mark.parametrize(
    ("fields", "names", "text"),
    [
        ({"seq_no": "1e400"}, "a", "'seq_no' is not a number"),
        ({"color": "red"}, "a", "unknown field 'color'"),
        ({"a_metadata": ["{}", "{}"]}, "a", "more fields 'a_metadata'"),
        ({"a_metadata": "{"}, "a", "not JSON"),
    ],
)
def test_wrong_forms_are_refused(server: ServerProcess, fields: dict[str, Any], names: str, text: str) -> None:
    files = [(name, (name, b"")) for name in names]
    answer = post(server, "/v1/infer-multipart", data={"block_id": "whole", "session_id": "s"} | fields, files=files)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (400, True), answer.text


def test_the_protocol_is_reflected_and_healthy(server: ServerProcess) -> None:
    service = "BlockInferenceService"
    with grpc.insecure_channel(server.grpc) as channel:
        ask_health = health_pb2_grpc.HealthStub(channel).Check
        assert (
            ask_health(health_pb2.HealthCheckRequest(service=service)).status == health_pb2.HealthCheckResponse.SERVING
        )
        found = ProtoReflectionDescriptorDatabase(channel)
        assert service in found.get_services()
        assert "infer" in DescriptorPool(found).FindServiceByName(service).methods_by_name


def run(command: list[str], **options: Any) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, **options)
    assert (ran.returncode, ran.stderr) == (0, "")
    printed: str = ran.stdout
    return printed


def run_program(server: ServerProcess, name: str, folder: Path = ROOT, **environment: str) -> Any:
    """Run a program of examples/global, and return the data that it prints."""
    settings = {**os.environ, "SERVER_ADDRESS": server.grpc, **environment}
    printed = run([sys.executable, str(ROOT / "examples/global" / name)], cwd=folder, env=settings)
    lines = dict(line.split(": ", 1) for line in printed.splitlines() if ": " in line)
    assert lines["Sequence No"] == "1"
    return json.loads(lines["Data"])


def test_the_chat_program_prints_an_answer(server: ServerProcess) -> None:
    assert run_program(server, "chat.py", BLOCK_ID="smollm2")["messages"][0]["content"]


def test_the_detection_program_finds_a_face_in_its_region(server: ServerProcess, tmp_path: Path) -> None:
    """The program limits the search to x 50 to 250 in the first image; the face begins at x 175, y 70."""
    astronaut = Image.fromarray(skimage.data.astronaut())
    canvas = Image.new("RGB", (600, 600))
    canvas.paste(astronaut.crop((160, 55, 290, 180)), (80, 110))
    canvas.save(tmp_path / "image1.jpg", quality=95)
    Image.new("RGB", (300, 300)).save(tmp_path / "image2.jpg")
    found = run_program(server, "detect_objects.py", tmp_path, BLOCK_ID="faces")
    first, second = found["detections"]
    assert (first["file_name"], second["file_index"], second["boxes"]) == ("image1.jpg", 1, [])
    (box,) = first["boxes"]
    assert (box["label"], abs(box["x"] - 95) < 20, abs(box["y"] - 125) < 20) == ("face", True, True), box


def test_a_packet_is_sent_from_the_command_line(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1234")
    command = [sys.executable, "-m", "penstock", "block", "infer", "counter", "--server", server.http_url]
    command += ["--data", '{"text": "one two"}', "--file", str(tmp_path / "a.bin"), "--session", "from-a-shell"]
    run([*command, "--output-dir", str(tmp_path / "out")])
    assert (tmp_path / "out/file-0").read_bytes() == b"1234"
    assert json.loads(run([*command, "--json"]))["data"] == {"words": 2, "sizes": {"a.bin": 4}}


def test_the_walk_through_the_global_server_works(server: ServerProcess) -> None:
    page = (ROOT / "docs/global.md").read_text().partition("## Request log")[0]
    steps = re.findall(r"^```sh\n((?:curl|SERVER).*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(steps) == 4
    for step in steps:
        shell = step.replace("localhost:8080", server.http_url).replace("127.0.0.1:50051", server.grpc)
        printed = run(["bash", "-c", shell.replace("python ", f"{sys.executable} ")], cwd=ROOT)
        assert "sess-12345" in printed or json.loads(printed).keys() & {"session_id", "location"}, printed
