"""The voice model in a real server: equal to its package's probabilities, in one piece or as a stream of pieces."""

import json
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from penstock.client import Client
from penstock.core.errors import InvalidRequest, InvalidTensor, ModelNotReady
from penstock.core.tensors import Array
from tests.servers import ROOT, write_identity

WAIT_S = 60.0
WINDOW = 512
OWN_WRAPPER = """
import json, sys, numpy, torch
from silero_vad.utils_vad import OnnxWrapper
file, rate, window = sys.argv[1], int(sys.argv[2]), 512 * int(sys.argv[2]) // 16000
audio = torch.from_numpy(numpy.frombuffer(sys.stdin.buffer.read(), numpy.float32).copy())
network = OnnxWrapper(file, force_onnx_cpu=True)
print(json.dumps([network(audio[at : at + window], rate).item() for at in range(0, len(audio) - window + 1, window)]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("voice")
    shutil.copytree(ROOT / "models/voice", folder / "models/voice")
    with ServerProcess(folder / "models", folder, "--workers", "1") as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.grpc, timeout_s=WAIT_S) as opened:
        yield opened


@pytest.fixture(scope="module")
def audio() -> Array:
    """Return a second of silence, speech, and half a second of noise."""
    with wave.open(str(ROOT / "tests/data/speech.wav")) as file:
        assert file.getframerate() == 16_000
        speech = np.frombuffer(file.readframes(file.getnframes()), np.int16) / np.float32(32768)
    noise = np.random.default_rng(7).normal(0, 0.02, 8_000)
    return np.concatenate([np.zeros(16_000), speech, noise]).astype(np.float32)


def own_probabilities(audio: Array, sample_rate: int) -> list[float]:
    """Return the package's own probabilities, computed in another process because the package imports torch."""
    from importlib.util import find_spec

    found = find_spec("silero_vad")
    assert found is not None
    assert found.submodule_search_locations is not None
    file = Path(found.submodule_search_locations[0], "data", "silero_vad.onnx")
    ran = subprocess.run(
        [sys.executable, "-c", OWN_WRAPPER, str(file), str(sample_rate)],
        input=audio.tobytes(),
        stdout=subprocess.PIPE,
        check=True,
    )
    found_numbers: list[float] = json.loads(ran.stdout)
    return found_numbers


def read_probabilities(client: Client, audio: Array, **parameters: str | int | bool) -> list[float]:
    speech: list[float] = client.infer("voice", {"audio": audio}, parameters=parameters)["speech"].tolist()
    return speech


def cut(audio: Array, seed: int) -> list[Array]:
    """Cut the audio into pieces of any size, some of them empty."""
    sizes = np.random.default_rng(seed).choice([0, 1, 63, 64, 65, 160, 511, 512, 513, 1023, 4000], 400)
    pieces = np.split(audio, np.minimum(np.cumsum(sizes), len(audio)))
    return pieces[: max(index for index, piece in enumerate(pieces) if len(piece)) + 1]


@pytest.mark.parametrize("sample_rate", [16_000, 8_000])
def test_the_probabilities_equal_those_of_the_package(client: Client, audio: Array, sample_rate: int) -> None:
    sent = audio[:: 16_000 // sample_rate].copy()
    expected = own_probabilities(sent, sample_rate)
    assert len(expected) == len(audio) // WINDOW
    assert read_probabilities(client, sent, sample_rate=sample_rate) == expected
    assert read_probabilities(client, sent, sample_rate=sample_rate) == expected, (
        "each request without a session stands alone"
    )


def test_speech_scores_high_and_other_audio_low(client: Client, audio: Array) -> None:
    heard = np.array(read_probabilities(client, audio))
    starts = np.arange(len(heard)) * WINDOW
    silence, noise = heard[starts < 15_000], heard[starts > len(audio) - 6_000]
    speech = heard[(starts > 20_000) & (starts < len(audio) - 14_000)]
    assert silence.max() < 0.1
    assert noise.max() < 0.3
    assert np.mean(speech > 0.9) > 0.9


def test_a_stream_gives_the_same_answer_for_any_pieces(client: Client, audio: Array) -> None:
    whole = read_probabilities(client, audio)
    streams = {f"call-{seed}": cut(audio, seed) for seed in range(3)}
    heard: dict[str, list[float]] = {name: [] for name in streams}
    for number in range(max(map(len, streams.values()))):  # one piece of each stream in turn
        for name, pieces in streams.items():
            if number < len(pieces):
                is_last = number == len(pieces) - 1
                heard[name] += read_probabilities(
                    client, pieces[number], session_id=name, seq_no=number + 1, sequence_end=is_last
                )
    assert heard == dict.fromkeys(streams, whole)


def test_invalid_audio_is_refused_and_the_stream_continues(client: Client, audio: Array) -> None:
    half = len(audio) // 2
    heard = read_probabilities(client, audio[:half], session_id="patient")
    with pytest.raises(InvalidTensor, match="divide 16-bit samples by 32768"):
        read_probabilities(client, audio[half:] * 32768, session_id="patient")
    with pytest.raises(InvalidTensor, match="not a number"):
        read_probabilities(client, np.array([0, np.nan], np.float32), session_id="patient")
    with pytest.raises(InvalidRequest, match="sample_rate 44100 is not heard; send audio at 16000 or 8000"):
        read_probabilities(client, audio, sample_rate=44_100)
    with pytest.raises(InvalidRequest, match="the session began with sample_rate 16000"):
        read_probabilities(client, audio, session_id="patient", sample_rate=8_000)
    assert heard + read_probabilities(client, audio[half:], session_id="patient") == read_probabilities(client, audio)
    assert read_probabilities(client, audio[: WINDOW - 1]) == []


def test_serving_the_voice_model_does_not_import_torch(client: Client, server: ServerProcess, audio: Array) -> None:
    read_probabilities(client, audio[:WINDOW])
    family = server.family()
    (host,) = [process for process in family if "penstock.engines.python.python_host" in process.cmdline()]
    mapped = Path(f"/proc/{host.pid}/maps").read_text()
    assert "onnxruntime" in mapped
    assert "libtorch" not in mapped


def test_a_missing_package_fails_only_requests_to_its_model(tmp_path: Path) -> None:
    (tmp_path / "path/silero_vad").mkdir(parents=True)  # in front of the real one
    (tmp_path / "path/silero_vad/__init__.py").touch()
    shutil.copytree(ROOT / "models/voice", tmp_path / "models/voice")
    write_identity(tmp_path / "models", "neighbour", "FP32")
    path = {"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT / 'src'}"}
    server = ServerProcess(tmp_path / "models", tmp_path, "--workers", "1", environment=path)
    with server, Client(server.grpc, timeout_s=WAIT_S) as client:
        with pytest.raises(ModelNotReady, match="pip install --no-deps silero-vad"):
            read_probabilities(client, np.zeros(WINDOW, np.float32))
        numbers = np.ones((1, 2), np.float32)
        assert np.array_equal(client.infer("neighbour", {"x": numbers})["y"], numbers)
        assert client.is_ready()
        (tmp_path / "path/silero_vad/__init__.py").unlink()
        (tmp_path / "path/silero_vad").rmdir()  # as if it were installed now
        assert httpx.post(f"{server.http_url}/v2/repository/models/voice/load", timeout=WAIT_S).status_code == 200
        eventually(lambda: is_known(client), "it is served now", WAIT_S)


def is_known(client: Client) -> bool:
    try:
        return len(read_probabilities(client, np.zeros(WINDOW, np.float32))) == 1
    except ModelNotReady:  # the gateway has not received the update yet
        return False
