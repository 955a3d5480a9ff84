"""The status of a block that workers run in the same way or in different ways."""

from dataclasses import replace
from typing import Any

from penstock.core.blocks import BlockDescription
from penstock.core.settings import BlockSettings
from penstock.gateway.catalogue import describe_run
from penstock.router.lanes.lane import ConnectedWorker

LANE: Any = None
FAST = BlockDescription("b", "m", "1", "openvino", "bf16", (), (), 8, 2, BlockSettings(), note="it has BF16")
PLAIN = replace(FAST, platform="onnxruntime_onnx", precision="fp32", note="it has none")
UNLOADED = replace(FAST, platform="", precision="auto", note="", is_described=False)


def worker(name: str, *blocks: BlockDescription) -> ConnectedWorker:
    return ConnectedWorker(name.encode(), name, 1, LANE, blocks={block.block_id: block for block in blocks})


def test_workers_that_run_a_block_alike_are_listed_once() -> None:
    remembered = replace(FAST, note="it has BF16 (remembered)")
    told = describe_run(FAST, [worker("a", FAST), worker("b", remembered), worker("c"), worker("d", UNLOADED)])
    assert told == {"platform": "openvino", "precision": "bf16", "device": "cpu", "note": "it has BF16"}
    assert describe_run(None, [worker("a")]) == {}


def test_workers_that_run_a_block_differently_are_listed_separately() -> None:
    told = describe_run(FAST, [worker("a", FAST), worker("b", PLAIN), worker("c", PLAIN)])
    assert told["note"] == "openvino bf16 cpu on a: it has BF16; onnxruntime_onnx fp32 cpu on b: it has none"
