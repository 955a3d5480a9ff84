"""Converts a request's sampling parameters to OpenVINO GenAI's configuration of one sequence."""

import random
from typing import Any

import openvino_genai as genai

from penstock.core.errors import InvalidRequest
from penstock.core.generation import Sampling
from penstock.engines.genai.runtime import error_line

GREEDY_BELOW = 1e-5  # a lower temperature would divide by almost zero


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def make_config(sampling: Sampling, max_tokens: int, choice: int) -> Any:
    """Return OpenVINO GenAI's configuration for one of a request's `n` choices (alternative answers).

    Raise InvalidRequest if the engine rejects the parameters.
    """
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.min_new_tokens = min(sampling.min_tokens, max_tokens)
    config.ignore_eos = sampling.ignore_eos
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    config.repetition_penalty = sampling.repetition_penalty
    config.logprobs = int(sampling.has_logprobs)
    if not is_greedy(sampling):
        config.do_sample = True
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        if sampling.top_k:
            config.top_k = sampling.top_k
        # The choices of one request differ even if it sets a seed; without a seed, every choice gets a random one.
        config.rng_seed = random.getrandbits(32) if sampling.seed is None else (sampling.seed + choice) % 2**32
    if sampling.json_schema:
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=sampling.json_schema)
    try:
        config.validate()
    except Exception as error:
        raise InvalidRequest(f"the engine rejects this request: {error_line(error)}") from error
    return config
