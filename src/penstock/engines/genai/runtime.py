"""Loads OpenVINO GenAI's pipeline with a limited cache and number of threads, and runs its steps."""

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from penstock.core.errors import ConfigError
from penstock.engines.genai.gguf_facts import GeneratorFacts, read_facts

BLOCK_TOKENS = 32  # in a block of the cache, on a CPU
STEP_TOKENS = 256  # computed in one step, so that a longer prompt takes several; OpenVINO GenAI's default
MIB = 1024 * 1024
SCALE_BYTES = 8  # a scale and an offset, for each quantized column of keys and row of values
_PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}


class GenaiRuntime:
    """Loads a model into a pipeline of OpenVINO GenAI, and runs the pipeline's steps."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the model, which takes seconds; raise ConfigError if that fails."""
        file = Path(settings["file"])
        self.facts = read_facts(file)
        self.cache_blocks = _count_cache_blocks(file, self.facts, settings["cache_mb"])
        self.precision = _choose_precision(settings["precision"])
        self._numbers = count()
        try:
            self._pipeline = genai.ContinuousBatchingPipeline(
                file if file.suffix == ".gguf" else file.parent,
                _scheduler_config(self.cache_blocks),
                "CPU",
                _runtime_properties(settings["threads"], settings["precision"]),
            )
        except Exception as error:
            raise ConfigError(f"{file}: OpenVINO GenAI cannot load it: {error_line(error)}", file=str(file)) from error
        self.tokenizer = self._pipeline.get_tokenizer()
        self._warm_up()

    @property
    def is_busy(self) -> bool:
        """True if the pipeline has requests, including finished requests whose memory is not freed yet."""
        return bool(self._pipeline.has_non_finished_requests())

    @property
    def blocks_used(self) -> int:
        """Return how many blocks of the cache were in use after the last step."""
        percent: float = self._pipeline.get_metrics().cache_usage
        return round(percent * self.cache_blocks / 100)

    def add(self, ids: Sequence[int], config: Any) -> Any:
        """Add a sequence; return a handle that provides its tokens after each step and can stop it."""
        return self._pipeline.add_request(next(self._numbers), ov.Tensor(np.array([ids], np.int64)), config)

    def step(self) -> None:
        """Run one step, which holds Python's global lock. After an exception, the pipeline cannot be used any more."""
        self._pipeline.step()

    def _warm_up(self) -> None:
        """Run two steps, because a pipeline's first step takes many times as long as later ones."""
        self.add([0], genai.GenerationConfig(max_new_tokens=2))
        while self.is_busy:
            self.step()


def error_line(error: Exception) -> str:
    """Return an error's last line, which has the cause; earlier lines are locations in the runtime's code."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1][-300:] if lines else type(error).__name__


def _count_cache_blocks(file: Path, facts: GeneratorFacts, cache_mb: int) -> int:
    """Return how many blocks fit into the cache.

    Keys and values take one byte per number. Keys also have a scale per column, and values have a scale per token.
    """
    if not facts.head_size:
        raise ConfigError(f"{file}: has no number of layers and heads: it is not a generating model", file=str(file))
    keys = facts.head_size * (BLOCK_TOKENS + SCALE_BYTES)
    values = BLOCK_TOKENS * (facts.head_size + SCALE_BYTES)
    return max(1, cache_mb * MIB // (facts.layers * facts.kv_heads * (keys + values)))


def _scheduler_config(cache_blocks: int) -> Any:
    config = genai.SchedulerConfig()
    config.num_kv_blocks = cache_blocks
    config.cache_size = 0
    config.max_num_batched_tokens = STEP_TOKENS
    config.dynamic_split_fuse = True  # compute a long prompt in parts, while other generations continue
    config.enable_prefix_caching = True
    return config


def _runtime_properties(threads: int, precision: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
        "sampler_num_threads": threads,
    }
    if precision in _PRECISIONS:
        found["INFERENCE_PRECISION_HINT"] = _PRECISIONS[precision]
    return found


def _choose_precision(requested: str) -> str:
    """Return the requested precision; for `auto`, BF16 if the processor supports it, else FP32."""
    if requested != "auto":
        return requested
    return "bf16" if "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "fp32"
