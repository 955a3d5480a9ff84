"""The GPU memory that loading a model takes."""

import os
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engines.torch.reserved import free_cached_memory
from penstock.models.device_meter import DeviceMeter
from penstock.telemetry.gpus import Gpus
from tests.nvml import FakeGpu, FakeNvml


def test_growth_of_the_process_is_the_memory_of_the_load() -> None:
    gpu = FakeGpu(used=100)
    meter = DeviceMeter(Gpus(FakeNvml(gpu)))
    gpu.used, gpu.processes = 900, {os.getpid(): 300, 1: 500}
    assert meter.taken_bytes("cuda") == 300
    assert meter.taken_bytes("cpu") == 0
    more = DeviceMeter(Gpus(FakeNvml(gpu)))
    gpu.used, gpu.processes = 950, {os.getpid(): 350, 1: 500}
    assert more.taken_bytes("cuda:0") == 50


def test_pytorch_is_measured_if_the_driver_knows_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, reserved = FakeGpu(used=100), {1: 0}
    emptied: list[bool] = []
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_reserved=reserved.__getitem__)
    cuda.empty_cache = lambda: emptied.append(True)
    monkeypatch.setitem(sys.modules, "torch", cast(Any, SimpleNamespace(cuda=cuda)))
    reserved[0] = 10
    meter = DeviceMeter(Gpus(FakeNvml(gpu, FakeGpu())))
    gpu.used, reserved[0] = 900, 60
    assert meter.taken_bytes("cuda") == 50
    reserved[0] = 10  # another engine took memory
    assert meter.taken_bytes("cuda:0") == 800
    free_cached_memory()
    assert emptied == [True]


def test_device_is_measured_if_the_driver_knows_no_processes() -> None:
    gpu = FakeGpu(used=100)
    meter = DeviceMeter(Gpus(FakeNvml(gpu)))
    gpu.used = 400
    assert meter.taken_bytes("cuda:0") == 300
    gpu.used = 50
    assert meter.taken_bytes("cuda:0") == 0
    gpu.is_lost = True
    assert meter.taken_bytes("cuda:0") == 0
