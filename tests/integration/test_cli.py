"""Every command and the Python clients against a real server."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from PIL import Image

from benchmarks.server import ServerProcess
from penstock.client import AsyncClient, Client
from penstock.core.errors import InvalidImage, UnknownModel
from tests.servers import ROOT, write_add_sub, write_identity

PHOTOS = ROOT / "src" / "penstock" / "models" / "samples" / "data" / "photos"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("cli")
    models = folder / "models"
    models.mkdir()
    for name in ("minilm", "srcnn"):
        (models / name).symlink_to(ROOT / "models" / name)
    for datatype in ("FP32", "BF16", "BYTES"):
        write_identity(models, f"identity-{datatype.lower()}", datatype)
    write_add_sub(models, "add_sub")
    with ServerProcess(models, folder) as running:
        yield running


def run(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)


def ok(*arguments: str, stdin: str = "") -> str:
    done = run(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*arguments: str, stdin: str = "") -> str:
    """Return standard error of a command that ends with code 2 and without a traceback."""
    done = run(*arguments, stdin=stdin)
    assert done.returncode == 2, done.stdout
    said = [
        line for line in done.stderr.splitlines() if "run_folder_removed" not in line
    ]  # of a server that was killed
    assert said[0].startswith("penstock: ")
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def grpc(server: ServerProcess) -> tuple[str, str]:
    return "--server", server.grpc


def test_embed_shows_shape_and_first_numbers(grpc: tuple[str, str]) -> None:
    shown = ok("embed", "a cat", "a dog", *grpc).splitlines()
    assert shown[0] == "2 × 384 float32"
    assert shown[1].startswith("[")
    assert shown[1].endswith("a cat")


def test_embed_reads_arguments_files_and_stdin_alike(grpc: tuple[str, str], tmp_path: Path) -> None:
    texts = "a cat\nein Hund, größer als eine Katze\n"
    (tmp_path / "texts.txt").write_text(texts, encoding="utf-8")
    by_arguments = json.loads(ok("embed", *texts.splitlines(), "--json", *grpc))
    by_file = json.loads(ok("embed", "--file", str(tmp_path / "texts.txt"), "--json", *grpc))
    by_stdin = json.loads(ok("embed", "--json", *grpc, stdin=texts))
    assert by_arguments["shape"] == [2, 384]
    for other in (by_file, by_stdin):
        np.testing.assert_allclose(other["embeddings"], by_arguments["embeddings"], atol=2e-3)


def test_embed_keeps_the_order_of_many_texts(grpc: tuple[str, str], tmp_path: Path) -> None:
    texts = [f"the number {index} and {'more ' * (index % 7)}" for index in range(300)]
    file = tmp_path / "vectors.npy"
    assert "300 × 384" in ok("embed", "--output", str(file), *grpc, stdin="\n".join(texts))
    few = json.loads(ok("embed", texts[0], texts[150], texts[299], "--json", *grpc))["embeddings"]
    np.testing.assert_allclose(np.load(file)[[0, 150, 299]], few, atol=2e-3)


def test_embed_reports_errors(grpc: tuple[str, str]) -> None:
    assert "unknown model 'nope'; this server has: " in refused("embed", "x", "--model", "nope", *grpc)
    assert "this model takes" in refused("embed", "x", "--model", "srcnn", *grpc)


def test_upscale_doubles_a_photograph(grpc: tuple[str, str], tmp_path: Path) -> None:
    ok("upscale", str(PHOTOS / "dogs.jpg"), str(tmp_path / "dogs.png"), *grpc)
    with Image.open(PHOTOS / "dogs.jpg") as before, Image.open(tmp_path / "dogs.png") as after:
        assert after.size == (2 * before.width, 2 * before.height)


def test_upscale_writes_the_requested_format(grpc: tuple[str, str], tmp_path: Path) -> None:
    output_options = ("--mode", "denoise", "--resolution", "360p", "--quality", "70")
    ok("upscale", str(PHOTOS / "dogs.jpg"), str(tmp_path / "dogs.webp"), *output_options, *grpc)
    with Image.open(tmp_path / "dogs.webp") as after:
        assert (after.format, after.size) == ("WEBP", (480, 360))
    refused = run("upscale", str(PHOTOS / "dogs.jpg"), "--to", str(tmp_path), "--format", "gif", *grpc)
    assert refused.returncode == 2
    assert "parameter 'format' is 'gif'; it must be png, jpeg or webp" in refused.stderr


@pytest.mark.parametrize("transport", ["grpc", "websocket"])
def test_stream_accepts_the_image_options(server: ServerProcess, tmp_path: Path, transport: str) -> None:
    frame = tmp_path / "frame.png"
    Image.new("RGB", (64, 32), "teal").save(frame)
    options = ("--mode", "denoise", "--resolution", "2x", "--format", "webp", "--transport", transport)
    ok("stream", str(frame), "--output", str(tmp_path / "out"), *options, "--server", f"127.0.0.1:{server.http_port}")
    with Image.open(tmp_path / "out" / "000001.webp") as image:
        assert (image.format, image.size) == ("WEBP", (128, 64))
    refused_format = run(
        "stream", str(frame), "--output", str(tmp_path), "--format", "gif", "--server", f"127.0.0.1:{server.http_port}"
    )
    assert refused_format.returncode == 2
    assert "gif" in refused_format.stderr


def test_upscale_takes_several_files_and_continues_after_a_bad_one(grpc: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    files = [str(PHOTOS / "dogs.jpg"), str(tmp_path / "text.jpg"), str(PHOTOS / "fig.jpg"), "missing.jpg"]
    done = run("upscale", *files, "--to", str(tmp_path / "out"), "--json", *grpc)
    assert done.returncode == 2
    results = json.loads(done.stdout)
    assert [bool(result["problem"]) for result in results] == [False, True, False, True]
    assert "text.jpg: the data is not a JPEG or PNG image" in done.stderr
    assert "missing.jpg: cannot be read" in done.stderr
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["dogs.png", "fig.png"]


def test_infer_reads_json_and_files(grpc: tuple[str, str], tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.array([[4, 3, 2, 1]], np.int32))
    inputs = ("--input", "a=[1, 2, 3, 4]", "--input", f"b=@{tmp_path / 'b.npy'}")
    found = {output["name"]: output for output in json.loads(ok("infer", "add_sub", *inputs, "--json", *grpc))}
    assert found["sum"]["data"] == [5, 5, 5, 5]
    assert found["difference"]["datatype"] == "INT32"
    only = json.loads(ok("infer", "add_sub", *inputs, "--output", "sum", "--json", *grpc))
    assert [output["name"] for output in only] == ["sum"]
    assert "sum INT32 [1, 4] [5, 5, 5, 5]" in ok("infer", "add_sub", *inputs, *grpc)


def test_infer_writes_files(grpc: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ok("infer", "identity-fp32", "--input", "x=[[1.5, 2]]", "--output-dir", str(out), *grpc)
    assert np.load(out / "y.npy").tolist() == [[1.5, 2]]
    ok("infer", "srcnn", "--input", f"image=@{PHOTOS / 'dogs.jpg'}", "--output-dir", str(out), *grpc)
    assert (out / "image.bin").read_bytes().startswith(b"\x89PNG")


def test_infer_supports_other_datatypes(grpc: tuple[str, str]) -> None:
    (half,) = json.loads(ok("infer", "identity-bf16", "--input", "x=[[1.5, -2]]", "--json", *grpc))
    assert (half["datatype"], half["data"]) == ("BF16", [1.5, -2])
    (text,) = json.loads(ok("infer", "identity-bytes", "--input", "x=grüß dich", "--json", *grpc))
    assert (text["shape"], text["data"]) == ([1, 1], ["grüß dich"])


def test_infer_shows_the_models_inputs(grpc: tuple[str, str]) -> None:
    assert "unknown model" in refused("infer", "nope", *grpc)
    assert "takes a INT32 [-1, 4], b INT32 [-1, 4]" in refused("infer", "add_sub", "--input", "c=[1]", *grpc)
    assert "has shape [1, 2]" in refused("infer", "add_sub", "--input", "a=[1, 2]", "--input", "b=[1, 2]", *grpc)
    assert "no version '9'" in refused("infer", "add_sub", "--model-version", "9", *grpc)


def test_status_is_printed(server: ServerProcess) -> None:
    found = json.loads(ok("status", "--server", server.http_url, "--json"))
    assert found["ready"] is True
    assert {block["model"] for block in found["blocks"]} >= {"minilm", "srcnn"}
    assert found["grpc_server"]["server"] == "native"
    shown = ok("status", "--server", server.http_url)
    for expected in (": ready", "gRPC server: native (no TLS and no keys,", "worker-0", "minilm", "srcnn"):
        assert expected in shown


def test_the_log_command_explains_how_to_enable_the_request_log(server: ServerProcess) -> None:
    said = refused("log", "--server", server.http_url)
    assert "this server keeps no request log: its operator may set request_log.url" in said


def test_commands_report_that_they_find_no_server() -> None:
    for command in (["embed", "x", "--server"], ["infer", "m", "--server"], ["status", "--server"]):
        assert "is `penstock serve` running at" in refused(*command, "127.0.0.1:1")


def test_serve_refuses_invalid_settings(tmp_path: Path, server: ServerProcess) -> None:
    data = ("--data-dir", str(tmp_path / "data"), "--http-port", "0", "--grpc-port", "0")
    assert "no such folder of models" in refused("serve", "--models", str(tmp_path / "none"), *data)
    assert "'--workers': must be a whole number" in run("serve", "--workers", "two", *data).stderr
    write_identity(tmp_path / "own", "plain", "FP32")
    assert f"penstock serve {tmp_path / 'own'}" in refused("serve", str(tmp_path / "own" / "plain"), *data)
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "m" / "model.yaml").write_text("engine: onnx\nbatching:\n  max_rows: 0\n")
    (tmp_path / "models" / "other").mkdir()
    (tmp_path / "models" / "other" / "model.yaml").write_text("tasks: embed\n")
    told = refused("serve", "--models", str(tmp_path / "models"), *data)
    assert "model.yaml:3: batching.max_rows" in told
    assert "unknown key 'tasks'" in told
    assert "--watch" in told


def test_the_blocking_client_works(server: ServerProcess) -> None:
    with Client(server.grpc) as client:
        assert client.is_ready()
        assert {entry.name for entry in client.models() if entry.state == "READY"} >= {"minilm", "srcnn"}
        assert client.embed(["a", "b"]).shape == (2, 384)
        assert client.upscale((PHOTOS / "dogs.jpg").read_bytes()).startswith(b"\x89PNG")
        sent = np.array([[1.5, 2]], ml_dtypes.bfloat16)
        assert client.infer("identity-bf16", {"x": sent})["y"].tolist() == [[1.5, 2]]
        with pytest.raises(UnknownModel):
            client.embed(["a"], model="nope")


async def test_the_async_client_works(server: ServerProcess) -> None:
    async with AsyncClient(server.grpc) as client:
        texts = [f"text {index}" for index in range(200)]
        one_by_one = await asyncio.gather(*(client.embed([text]) for text in texts))
        together = await client.embed(texts)
        np.testing.assert_allclose(np.concatenate(one_by_one), together, atol=2e-3)
        with pytest.raises(InvalidImage):
            await client.upscale(b"no image")
        assert (await client.infer("identity-bytes", {"x": np.array([["a", "é"]], object)}))["y"].tolist() == [
            [b"a", "é".encode()]
        ]
