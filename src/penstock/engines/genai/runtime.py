"""OpenVINO GenAI's pipeline: how it is loaded, and what it is told to take of the machine."""

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from penstock.core.errors import ConfigError
from penstock.engines.genai.facts import GeneratorFacts, read_facts

BLOCK_TOKENS = 32  # of the cache, on a CPU
MIB = 1024 * 1024
SCALE_BYTES = 8  # that go with numbers of a byte: what they are multiplied by, and added to
_PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}


class GenaiRuntime:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Takes seconds. Raises ConfigError."""
        file = Path(settings["file"])
        self.facts = read_facts(file)
        self.cache_blocks = _cache_blocks(file, self.facts, settings["cache_mb"])
        self.precision = _precision(settings["precision"])
        self._numbers = count()
        try:
            self._pipeline = genai.ContinuousBatchingPipeline(
                file if file.suffix == ".gguf" else file.parent,
                _scheduler(self.cache_blocks, settings["max_batched_tokens"], settings["prefix_caching"]),
                "CPU",
                _properties(settings["threads"], settings["precision"]),
            )
        except Exception as error:
            raise ConfigError(f"{file}: OpenVINO GenAI cannot load it: {said(error)}", file=str(file)) from error
        self.tokenizer = self._pipeline.get_tokenizer()
        self._warm_up()

    @property
    def is_busy(self) -> bool:
        """Something is there, if only to be given back."""
        return bool(self._pipeline.has_non_finished_requests())

    @property
    def blocks_used(self) -> int:
        """As the last step found it."""
        percent: float = self._pipeline.get_metrics().cache_usage
        return round(percent * self.cache_blocks / 100)

    def add(self, ids: Sequence[int], config: Any) -> Any:
        """A handle, by which to read what it gets with each step, and to stop it."""
        return self._pipeline.add_request(next(self._numbers), ov.Tensor(np.array([ids], np.int64)), config)

    def step(self) -> None:
        """Keeps Python's lock until it ends. May raise anything; then the pipeline is of no use any more."""
        self._pipeline.step()

    def _warm_up(self) -> None:
        """The first step takes many times what the others do."""
        self.add([0], genai.GenerationConfig(max_new_tokens=2))
        while self.is_busy:
            self.step()


def said(error: Exception) -> str:
    """The last line is what went wrong; those before say where in the runtime."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1][-300:] if lines else type(error).__name__


def _cache_blocks(file: Path, facts: GeneratorFacts, cache_mb: int) -> int:
    """Keys and values are kept as bytes: keys with scales for each column of a block, values for each token."""
    if not facts.head_size:
        raise ConfigError(
            f"{file}: does not tell its layers and heads: this is no model that generates", file=str(file)
        )
    keys = facts.head_size * (BLOCK_TOKENS + SCALE_BYTES)
    values = BLOCK_TOKENS * (facts.head_size + SCALE_BYTES)
    return max(1, cache_mb * MIB // (facts.layers * facts.kv_heads * (keys + values)))


def _scheduler(cache_blocks: int, max_batched_tokens: int, has_prefix_caching: bool) -> Any:
    config = genai.SchedulerConfig()
    config.num_kv_blocks = cache_blocks
    config.cache_size = 0
    config.max_num_batched_tokens = max_batched_tokens
    config.dynamic_split_fuse = True  # a long prompt is computed in parts, and the others go on beside it
    config.enable_prefix_caching = has_prefix_caching
    return config


def _properties(threads: int, precision: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
        "sampler_num_threads": threads,
    }
    if precision in _PRECISIONS:
        found["INFERENCE_PRECISION_HINT"] = _PRECISIONS[precision]
    return found


def _precision(asked: str) -> str:
    """What the runtime computes in, where it is not told."""
    if asked != "auto":
        return asked
    return "bf16" if "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "fp32"
