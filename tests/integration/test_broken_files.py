"""Commands that read a user's files say in Penstock's words what is wrong with a broken one, and exit with an error."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from penstock.cli import main as cli
from tests.digits import write_digits
from tests.servers import write_identity
from tests.small_models import write_dense

# How pydantic, struct, json, onnx, yaml, numpy and Pillow speak, and Python itself.
RAW = re.compile(
    r"validation errors? for|pydantic|Input should be|unpack\w* requires|Expecting (value|property|',')|"
    r"google\.protobuf|DecodeError|while (parsing|scanning) a|in \"<|pickled|PIL\.|UnicodeDecodeError|"
    r"codec can't|Traceback|object at 0x|KeyError|<class "
)
BINARY = b"\x00\xff\xfe junk \x80" * 40
YAML = [b"a: [1, 2\n", b"- a\n- list\n", b"\xff\xfe\x00", b"unknown_key: 1\n", b"\tx: 1\n", b"a: &x [*x]\n", b"3\n"]
JSON = [b"{", b"[1, 2", b'"text"', b"\xff\xfe", b"", b"[" * 5000]
IMAGES = [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + BINARY, b"\xff\xd8\xff\xe0" + BINARY, BINARY]
ARRAYS = [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x10\x00{'descr': 'x'}  \n", b"\x80\x04K\x01.", BINARY]
NETWORKS = [b"", b"\x08\x07", BINARY, b"version https://git-lfs.example/spec/v1\n"]
GGUF = [b"", b"GGUF", b"GGUF\x03\x00\x00\x00", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, BINARY]
WEIGHTS = [b"", b"\x08", (2**40).to_bytes(8, "little") + b"{}", (8).to_bytes(8, "little") + b'{"a": 1}', BINARY]
# By command: the file to break, its broken contents, and the words of the command.
TABLE: list[tuple[str, str, list[bytes]]] = [
    ("model check models/dense", "models/dense/model.yaml", YAML),
    ("model check models/dense", "models/dense/1/version.yaml", YAML),
    ("model check models/dense", "models/dense/1/model.onnx", NETWORKS),
    ("model quantize models/dense", "models/dense/model.yaml", YAML),
    ("model quantize models/dense", "models/dense/1/model.onnx", NETWORKS),
    ("model quantize models/dense --calibration texts.jsonl", "texts.jsonl", JSON),
    ("model quantize models/dense --calibration rows.npz", "rows.npz", ARRAYS),
    ("tune models/dense --minutes 0.1 --window 0.1", "models/dense/model.yaml", YAML[:2]),
    ("bench models/dense --device cpu", "models/dense/1/model.onnx", NETWORKS[:2]),
    ("serve models --config config.yaml", "config.yaml", YAML),
    ("manager --config config.yaml", "config.yaml", YAML),
    ("gateway --config config.yaml", "config.yaml", YAML),
    ("worker --config config.yaml", "config.yaml", YAML),
    ("experiment run experiment.yaml", "experiment.yaml", YAML),
    ("experiment compare results.json results.json", "results.json", JSON),
    ("model import mine --source checkpoint", "checkpoint/config.json", JSON),
    ("model import mine --source checkpoint", "checkpoint/model.safetensors", WEIGHTS),
    ("model import mine --source checkpoint", "checkpoint/tokenizer.json", JSON),
    ("model import chat.gguf", "chat.gguf", GGUF),
    ("classify broken.png --model digits", "broken.png", IMAGES),
    ("classify broken.npy --model digits", "broken.npy", ARRAYS),
    ("stream broken.png --output out --model digits", "broken.png", IMAGES[:2]),
    ("infer plain --input x=@rows.npy", "rows.npy", ARRAYS),
    ("search --query @query.json", "query.json", JSON),
    ("embed --file texts.txt --model plain", "texts.txt", [b"\xff\xfe\x00"]),
    ("generate --file texts.txt --model plain", "texts.txt", [b"\xff\xfe\x00"]),
    ("rerank query --file texts.txt --model plain", "texts.txt", [b"\xff\xfe\x00"]),
    ("model push models/dense", "models/dense/model.yaml", YAML),
    ("policy push mine:v1 policy.py", "policy.py", [b"\xff\xfe\x00", b"def rank(:\n", b""]),
    ("status --key-file key", "key", [b"\xff\xfe\x00"]),
    ("status --server https://127.0.0.1:9 --ca ca.pem", "ca.pem", [b"", BINARY]),
]
PORTS = {"serve": "--http-port 0 --grpc-port 0 --data-dir of-serve", "tune": "--dry-run"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("broken")
    write_identity(folder / "models", "plain", "FP32")
    write_digits(folder / "models", "digits", ("n", 8, 8, 1))
    with ServerProcess(folder / "models", folder, "--data-dir", str(folder / "data")) as running:
        yield running


@pytest.mark.parametrize(("command", "file", "contents"), TABLE, ids=[f"{row[0]} ({row[1]})" for row in TABLE])
def test_a_broken_file_is_explained(
    command: str,
    file: str,
    contents: list[bytes],
    server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_SERVER", server.http_url)
    words = command.split()
    words += PORTS.get(words[0], "").split()
    problems = []
    for content in contents:
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_dense(tmp_path / "models", "dense")
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({"model_type": "bert"}))
        (tmp_path / file).write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["penstock", *words])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        except BaseException as error:  # noqa: BLE001 - every exception that a user would see as a traceback counts
            code = repr(error)
        told = "".join(capfd.readouterr())
        if code not in (1, 2) or RAW.search(told) or not told.strip():
            problems.append(f"{content[:40]!r}: exit code {code}: {told[-600:]}")
    assert not problems, "\n\n".join(problems)
