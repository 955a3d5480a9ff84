"""The cost of a busy generating model for another model on the same machine, and what settings reduce it."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.repository import link_model
from benchmarks.suite.generation.asking import CompletionLoad, ask_all, post
from penstock.experiments.processes import ServerRun

GENERATING, NEIGHBOUR = "smollm2", "minilm"
CALLERS, TOKENS = 8, 128
EVERY_S = 0.05  # between two requests of the neighbour
WAYS: dict[str, dict[str, Any]] = {
    "gives_way": {"genai": {"nice": 19}},
    "one_thread": {"instances": {"threads": 1}},
    "as_shipped": {},
}


def measure_neighbour_p99_ms(models: Path, folder: Path, seconds: float) -> dict[str, float]:
    """Return the p99 of a model alone, and beside a generating model with each of these settings."""
    found: dict[str, float] = {}
    for name, changes in WAYS.items():
        link_model(models / NEIGHBOUR, folder / name / "models" / NEIGHBOUR)
        link_model(models / GENERATING, folder / name / "models" / GENERATING, residence={"load": "eager"}, **changes)
        with ServerRun(folder / name / "models", folder / name) as server:
            if not found:
                found["alone"] = asyncio.run(_measure_p99_ms(server.http, seconds, is_busy=False))
            found[name] = asyncio.run(_measure_p99_ms(server.http, seconds, is_busy=True))
    return found


async def _measure_p99_ms(address: str, seconds: float, is_busy: bool) -> float:
    prompts = [f"{number}. Once upon a time" for number in range(10_000)]
    busy = asyncio.create_task(
        ask_all(address, GENERATING, CompletionLoad(prompts, TOKENS, CALLERS), is_streamed=False)
    )
    try:
        if is_busy:
            await asyncio.sleep(2)
        else:
            busy.cancel()
        took = []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            async for _ in post(address, "/v1/embeddings", {"model": NEIGHBOUR, "input": "a short sentence"}):
                pass
            took.append(time.perf_counter() - began)
            await asyncio.sleep(max(0.0, EVERY_S - took[-1]))
        return 1000 * quantiles(took, n=100)[98]
    finally:
        busy.cancel()
        with suppress(asyncio.CancelledError):
            await busy
