"""What loading a model takes of a GPU."""

import os

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


def test_where_processes_are_not_known_it_is_what_the_device_has_more() -> None:
    gpu = FakeGpu(used=100)
    meter = DeviceMeter(Gpus(FakeNvml(gpu)))
    gpu.used = 400
    assert meter.taken_bytes("cuda:0") == 300
    gpu.used = 50
    assert meter.taken_bytes("cuda:0") == 0
    gpu.is_lost = True
    assert meter.taken_bytes("cuda:0") == 0
