"""Checks the JSON schema of a generation before the generation starts: an unusable schema would fail the whole batch.

Each schema is compiled in a separate pipeline with a dummy network, in a thread of its own.
"""

import json
import re
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
from penstock.engines.genai.schema_support import unsupported_part

MAX_RESULTS = 256  # number of schemas whose result is kept
SLOW_S = 5.0  # a schema that takes longer to compile would delay all other generations
MAX_BYTES = 64 * 1024
MAX_DEPTH = 64
MAX_NODES = 5_000
MAX_REPEATS = 1_024  # of an item, or of a part of a pattern
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_REPEATS = re.compile(r"\{(\d*)(?:,(\d*))?\}")


class GrammarCheck:
    """Checks JSON schemas for one model in other threads, and keeps the results."""

    def __init__(self, tokenizer: Any, vocabulary: int, wake: Callable[[], None]) -> None:
        """`wake` is called from another thread when a check is done."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._pipeline: Any = None
        self._results: OrderedDict[str, Future[str]] = OrderedDict()  # by schema: its problem, or an empty text

    def is_usable(self, schema: str) -> bool:
        """Return True if the schema was checked and is usable, or False while its check still runs.

        Raise InvalidRequest if the schema is unusable. After False, call again once `wake` was called.
        """
        found = self._results.get(schema)
        if found is None:
            check_schema(schema)
            self._results[schema] = found = self._thread.submit(self._try_schema, schema)
            found.add_done_callback(lambda _: self._wake())
            while len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
        if not found.done():
            return False
        self._results.move_to_end(schema)
        if problem := found.result():
            raise _invalid_schema_error(problem)
        return True

    def _try_schema(self, schema: str) -> str:
        if self._pipeline is None:
            self._pipeline = _build_pipeline(self._tokenizer, self._vocabulary)
        started = time.monotonic()
        config = genai.GenerationConfig(max_new_tokens=1)
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=schema)
        try:
            self._pipeline.generate(ov.Tensor(np.array([[0]], np.int64)), config)
        except Exception as error:  # noqa: BLE001 - native code raises any kind
            return str(error).strip().splitlines()[-1].rpartition(": ")[2][:300]
        took_s = time.monotonic() - started
        return f"it takes {took_s:.0f} s to compile; make it simpler" if took_s > SLOW_S else ""


def _build_pipeline(tokenizer: Any, vocabulary: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        ov.save_model(_build_network(vocabulary), Path(folder, "openvino_model.xml"), compress_to_fp16=False)
        Path(folder, "config.json").write_text(json.dumps({"model_type": "llama"}))
        return genai.LLMPipeline(folder, tokenizer, "CPU", ATTENTION_BACKEND="SDPA", INFERENCE_NUM_THREADS=1)


def _build_network(vocabulary: int) -> ov.Model:
    """Return a dummy network, which gives all tokens the same probability, for compiling schemas."""
    shapes = {"input_ids": [-1, -1], "attention_mask": [-1, -1], "position_ids": [-1, -1], "beam_idx": [-1]}
    types = {"beam_idx": np.int32}
    inputs = {name: op.parameter(shape, types.get(name, np.int64), name=name) for name, shape in shapes.items()}
    for name, value in inputs.items():
        value.output(0).set_names({name})
    # The runtime ignores inputs that are not used.
    sums = [
        op.reduce_sum(op.convert(value, "f32"), op.constant(np.arange(len(shapes[name]))))
        for name, value in inputs.items()
    ]
    nothing = op.multiply(op.add(op.add(sums[0], sums[1]), op.add(sums[2], sums[3])), op.constant(np.float32(0)))
    rows = op.unsqueeze(op.convert(inputs["input_ids"], "f32"), op.constant(np.array(2)))
    logits = op.add(op.multiply(rows, op.constant(np.zeros((1, 1, vocabulary), np.float32))), nothing)
    logits.output(0).set_names({"logits"})
    return ov.Model([op.result(logits)], list(inputs.values()), "nothing")


def check_schema(text: str) -> None:
    """Raise InvalidRequest if the schema is too large, or if the engine would ignore a part of it."""
    if len(text) > MAX_BYTES:
        raise _invalid_schema_error(f"it has {len(text)} characters, more than {MAX_BYTES}")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid_schema_error(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise _invalid_schema_error("it is not an object")
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    for nodes in range(MAX_NODES + 1):
        if not waiting:
            break
        node, depth = waiting.pop()
        if depth > MAX_DEPTH or nodes == MAX_NODES:
            raise _invalid_schema_error(f"it is nested deeper than {MAX_DEPTH}, or has more than {MAX_NODES} parts")
        if isinstance(node, dict):
            _check_repeats(node)
            waiting += [(each, depth + 1) for each in node.values()]
        elif isinstance(node, list):
            waiting += [(each, depth + 1) for each in node]
    if problem := unsupported_part(schema):
        raise _invalid_schema_error(problem)


def _check_repeats(node: dict[str, Any]) -> None:
    for key in _COUNTS:
        value = node.get(key)
        if isinstance(value, int | float) and value > MAX_REPEATS:
            raise _invalid_schema_error(f"{key} is {value}, more than {MAX_REPEATS}")
    pattern = node.get("pattern")
    if isinstance(pattern, str):
        repeats = 1
        for found in _REPEATS.finditer(pattern):
            repeats *= max(1, *(int(number[:9]) for number in found.groups() if number))
        if repeats > MAX_REPEATS:
            raise _invalid_schema_error(f"a pattern repeats its parts {repeats} times, more than {MAX_REPEATS}")


def _invalid_schema_error(problem: str) -> InvalidRequest:
    return InvalidRequest(f"response_format: the JSON schema cannot be used: {problem}", parameter="response_format")
