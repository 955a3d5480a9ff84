"""What loading a model takes of a GPU."""

import os
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engines.torch.reserved import give_back
from penstock.models.device_meter import DeviceMeter
from penstock.telemetry.devices import Gpus
from tests.nvml import FakeGpu, FakeNvml


def test_what_this_process_has_more_of_it_is_what_the_load_took() -> None:
    gpu = FakeGpu(used=100)
    meter = DeviceMeter(Gpus(FakeNvml(gpu)))
    gpu.used, gpu.processes = 900, {os.getpid(): 300, 1: 500}
    assert meter.taken_bytes("cuda") == 300
    assert meter.taken_bytes("cpu") == 0
    more = DeviceMeter(Gpus(FakeNvml(gpu)))
    gpu.used, gpu.processes = 950, {os.getpid(): 350, 1: 500}
    assert more.taken_bytes("cuda:0") == 50


def test_where_processes_are_not_known_pytorch_is_asked_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, reserved = FakeGpu(used=100), {1: 0}
    emptied: list[bool] = []
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_reserved=reserved.__getitem__)
    cuda.empty_cache = lambda: emptied.append(True)
    monkeypatch.setitem(sys.modules, "torch", cast(Any, SimpleNamespace(cuda=cuda)))
    reserved[0] = 10
    meter = DeviceMeter(Gpus(FakeNvml(gpu, FakeGpu())))
    gpu.used, reserved[0] = 900, 60
    assert meter.taken_bytes("cuda") == 50
    reserved[0] = 10  # another engine took it
    assert meter.taken_bytes("cuda:0") == 800
    give_back()
    assert emptied == [True]


def test_where_processes_are_not_known_it_is_what_the_device_has_more() -> None:
    gpu = FakeGpu(used=100)
    meter = DeviceMeter(Gpus(FakeNvml(gpu)))
    gpu.used = 400
    assert meter.taken_bytes("cuda:0") == 300
    gpu.used = 50
    assert meter.taken_bytes("cuda:0") == 0
    gpu.is_lost = True
    assert meter.taken_bytes("cuda:0") == 0
