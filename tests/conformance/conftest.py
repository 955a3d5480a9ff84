"""One real server for the tests with real clients."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import grpc  # noqa: F401 - before tritonclient, whose import below must bring its own messages alone
import pytest
from google.protobuf import descriptor_pool, json_format  # noqa: F401

from benchmarks.server import ServerProcess
from tests.servers import IDENTITY_TYPES, ROOT, write_add_sub, write_identity

SHIPPED = ("minilm/1/model.onnx", "srcnn/1/model.onnx", "smollm2/1/model.gguf")

# tritonclient and kserve both bring the protocol's messages, and the default pool takes a name once:
# in one process they can only live apart.
with mock.patch.object(descriptor_pool, "Default", return_value=descriptor_pool.DescriptorPool()):
    import tritonclient.grpc  # noqa: F401


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    models = folder / "models"
    models.mkdir()
    for datatype in IDENTITY_TYPES:
        write_identity(models, f"identity_{datatype.lower()}", datatype)
    write_add_sub(models, "add_sub")
    for file in SHIPPED:
        if (ROOT / "models" / file).exists():
            name = file.partition("/")[0]
            (models / name).symlink_to(ROOT / "models" / name)
    if (models / "minilm").exists():
        write_scorer(models)
    with ServerProcess(models, folder, "--allow-shared-memory") as running:
        yield running


def write_scorer(models: Path) -> None:
    """Write `pairs`: the encoder again, which scores the similarity of two texts."""
    (models / "pairs").mkdir()
    (models / "pairs/1").symlink_to(ROOT / "models/minilm/1")
    (models / "pairs/model.yaml").write_text("task: score\nengine: openvino\n")


@pytest.fixture
def minilm(server: ServerProcess) -> str:
    if not (ROOT / "models/minilm/1/model.onnx").exists():
        pytest.fail("minilm is not built: run scripts/setup")
    return "minilm"


@pytest.fixture
def smollm2(server: ServerProcess) -> str:
    if not (ROOT / "models/smollm2/1/model.gguf").exists():
        pytest.fail("smollm2 is not there: run scripts/setup")
    return "smollm2"


@pytest.fixture
def photo() -> bytes:
    return Path(ROOT / "src/penstock/models/samples/data/photos/fig.jpg").read_bytes()
