"""A model's folder, read before it is loaded."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.core.settings import Instances, Residence, Sessions
from penstock.models.model_yaml import ModelSettings
from penstock.telemetry.gpus import Gpus
from penstock.worker.residency.residency_actions import BlockAssignment
from penstock.worker.residency.survey import describe_from_settings, estimate_load, survey
from tests.nvml import GIB, FakeGpu, FakeNvml
from tests.small_models import write_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m")


def assigned(folder: Path, version: str = "1") -> BlockAssignment:
    return BlockAssignment("blk-m", "m", version, str(folder), 1)


def test_settings_and_size_are_reported(model: Path) -> None:
    outlook = survey(assigned(model), model, Gpus()).estimate
    assert outlook.files_bytes == 105 + (model / "model.yaml").stat().st_size
    assert outlook.residence == Residence(load="lazy", idle_unload_s=7.0, max_waiting_s=8.0)
    assert outlook.keep_s == 0.0


def test_faults_are_reported(model: Path) -> None:
    with pytest.raises(ConfigError, match="there is no version 3"):
        survey(assigned(model, "3"), model, Gpus())
    (model / "model.yaml").write_text("task: nonsense\n")
    with pytest.raises(ConfigError, match=r"model\.yaml:1"):
        survey(assigned(model), model, Gpus())


def test_a_block_that_was_never_loaded_has_no_description(model: Path) -> None:
    settings = ModelSettings(instances=Instances(count=3))
    block = describe_from_settings(assigned(model), settings)
    assert not block.is_described
    assert (block.block_id, block.model, block.version, block.platform) == ("blk-m", "m", "1", "")
    assert (block.inputs, block.outputs, block.max_batch_size, block.instances) == ((), (), 0, 3)
    assert block.settings == settings.for_block()


def test_a_stateful_model_is_kept_for_its_sessions() -> None:
    settings = ModelSettings(sessions=Sessions(is_stateful=True, idle_s=40.0))
    assert estimate_load(settings, 0, Gpus()).keep_s == 40.0


def test_the_memory_of_a_gpu_model_is_estimated_from_its_files_and_cuda_or_its_settings() -> None:
    gpus = Gpus(FakeNvml(FakeGpu(8 * GIB)))
    outlook = estimate_load(ModelSettings(instances=Instances(device="cuda")), 1000, gpus)
    assert (outlook.device, outlook.device_bytes, outlook.device_total_bytes) == ("cuda:0", 1000 + GIB // 2, 8 * GIB)
    told = ModelSettings(instances=Instances(device="cuda:0"), residence=Residence(device_memory_bytes=7))
    assert estimate_load(told, 1000, gpus).device_bytes == 7
    for device in ("cpu", "auto", "cuda:1"):
        outlook = estimate_load(ModelSettings(instances=Instances(device=device)), 1000, gpus)
        assert (outlook.device, outlook.device_bytes) == ("", 0)
