"""Whether the engine can follow a JSON schema, found out apart: in a batch one that it cannot would end all others.

A network that computes nothing stands for the model. Its pipeline lets other threads run meanwhile.
"""

import json
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13 as op

from penstock.core.errors import InvalidRequest
from penstock.engines.genai.schemas import check_schema

MAX_KNOWN = 256  # schemas that were looked at
SLOW_S = 5.0  # what takes longer to be made a grammar of would hold up the others for as long


class GrammarCheck:
    def __init__(self, tokenizer: Any, vocabulary: int, wake: Callable[[], None]) -> None:
        """`wake` is called in another thread when a check is done."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._pipeline: Any = None
        self._known: OrderedDict[str, Future[str]] = OrderedDict()  # what is wrong, or nothing

    def look(self, schema: str) -> bool:
        """Whether it may be used; False: not known yet, look again after `wake`. Raises InvalidRequest."""
        found = self._known.get(schema)
        if found is None:
            check_schema(schema)
            self._known[schema] = found = self._thread.submit(self._try, schema)
            found.add_done_callback(lambda _: self._wake())
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        if not found.done():
            return False
        self._known.move_to_end(schema)
        if problem := found.result():
            raise InvalidRequest(
                f"response_format: the JSON schema cannot be used: {problem}", parameter="response_format"
            )
        return True

    def _try(self, schema: str) -> str:
        if self._pipeline is None:
            self._pipeline = _pipeline(self._tokenizer, self._vocabulary)
        started = time.monotonic()
        config = genai.GenerationConfig(max_new_tokens=1)
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=schema)
        try:
            self._pipeline.generate(ov.Tensor(np.array([[0]], np.int64)), config)
        except Exception as error:  # noqa: BLE001 - of any kind, as native code throws
            return str(error).strip().splitlines()[-1].rpartition(": ")[2][:300]
        took_s = time.monotonic() - started
        return f"it takes {took_s:.0f} s to be looked through; make it simpler" if took_s > SLOW_S else ""


def _pipeline(tokenizer: Any, vocabulary: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        ov.save_model(_network(vocabulary), Path(folder, "openvino_model.xml"), compress_to_fp16=False)
        Path(folder, "config.json").write_text(json.dumps({"model_type": "llama"}))
        return genai.LLMPipeline(folder, tokenizer, "CPU", ATTENTION_BACKEND="SDPA", INFERENCE_NUM_THREADS=1)


def _network(vocabulary: int) -> ov.Model:
    """Finds all tokens equally likely, whatever it is given."""
    shapes = {"input_ids": [-1, -1], "attention_mask": [-1, -1], "position_ids": [-1, -1], "beam_idx": [-1]}
    types = {"beam_idx": np.int32}
    inputs = {name: op.parameter(shape, types.get(name, np.int64), name=name) for name, shape in shapes.items()}
    for name, value in inputs.items():
        value.output(0).set_names({name})
    # All must be used, or the runtime does not find them.
    sums = [
        op.reduce_sum(op.convert(value, "f32"), op.constant(np.arange(len(shapes[name]))))
        for name, value in inputs.items()
    ]
    nothing = op.multiply(op.add(op.add(sums[0], sums[1]), op.add(sums[2], sums[3])), op.constant(np.float32(0)))
    rows = op.unsqueeze(op.convert(inputs["input_ids"], "f32"), op.constant(np.array(2)))
    logits = op.add(op.multiply(rows, op.constant(np.zeros((1, 1, vocabulary), np.float32))), nothing)
    logits.output(0).set_names({"logits"})
    return ov.Model([op.result(logits)], list(inputs.values()), "nothing")
