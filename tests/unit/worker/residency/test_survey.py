"""What a model's folder tells before it is loaded."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.core.settings import Instances, Residence, Sessions
from penstock.models.settings import ModelSettings
from penstock.telemetry.devices import Gpus
from penstock.worker.residency.steps import Assigned
from penstock.worker.residency.survey import outlook_of, survey, undescribed
from tests.nvml import GIB, FakeGpu, FakeNvml
from tests.small_models import write_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m")


def assigned(folder: Path, version: str = "1") -> Assigned:
    return Assigned("blk-m", "m", version, str(folder), 1)


def test_settings_and_size_are_told(model: Path) -> None:
    outlook = survey(assigned(model), model, Gpus()).outlook
    assert outlook.files_bytes == 105 + (model / "model.yaml").stat().st_size
    assert outlook.residence == Residence(load="lazy", idle_unload_s=7.0, max_waiting_s=8.0)
    assert outlook.keep_s == 0.0


def test_what_is_wrong_is_told(model: Path) -> None:
    with pytest.raises(ConfigError, match="there is no version 3"):
        survey(assigned(model, "3"), model, Gpus())
    (model / "model.yaml").write_text("task: nonsense\n")
    with pytest.raises(ConfigError, match=r"model\.yaml:1"):
        survey(assigned(model), model, Gpus())


def test_a_block_that_was_never_loaded_says_so(model: Path) -> None:
    settings = ModelSettings(instances=Instances(count=3))
    block = undescribed(assigned(model), settings)
    assert not block.is_described
    assert (block.block_id, block.model, block.version, block.platform) == ("blk-m", "m", "1", "")
    assert (block.inputs, block.outputs, block.max_batch_size, block.instances) == ((), (), 0, 3)
    assert block.settings == settings.for_block()


def test_a_model_with_state_is_kept_for_its_sessions() -> None:
    settings = ModelSettings(sessions=Sessions(is_stateful=True, idle_s=40.0))
    assert outlook_of(settings, 0, Gpus()).keep_s == 40.0


def test_a_model_on_a_gpu_takes_its_files_and_what_cuda_takes_or_what_it_says() -> None:
    gpus = Gpus(FakeNvml(FakeGpu(8 * GIB)))
    outlook = outlook_of(ModelSettings(instances=Instances(device="cuda")), 1000, gpus)
    assert (outlook.device, outlook.device_bytes, outlook.device_total_bytes) == ("cuda:0", 1000 + GIB // 2, 8 * GIB)
    told = ModelSettings(instances=Instances(device="cuda:0"), residence=Residence(device_memory_bytes=7))
    assert outlook_of(told, 1000, gpus).device_bytes == 7
    for device in ("cpu", "auto", "cuda:1"):
        outlook = outlook_of(ModelSettings(instances=Instances(device=device)), 1000, gpus)
        assert (outlook.device, outlook.device_bytes) == ("", 0)
