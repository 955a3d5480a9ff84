"""The bare engine as a program: reads a line of JSON with the work, and writes a line with the results.

    python -m benchmarks.suite.generation.bare <settings as JSON>

The pipeline is made like that of a server, and one thread runs its steps.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import openvino_genai

from penstock.engines.genai.runtime import GenaiRuntime


class BareEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._runtime = GenaiRuntime(settings)

    def run(self, prompts: Sequence[str], tokens: int, callers: int, due: Sequence[float]) -> list[dict[str, float]]:
        """Generate texts for `callers` that wait for their answers or, if `callers` is 0, at the times `due`."""
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        running: dict[Any, tuple[dict[str, float], list[int]]] = {}
        found: list[dict[str, float]] = []
        began = time.perf_counter()
        while running or len(found) < len(prompts):
            at = time.perf_counter() - began
            while (index := len(found)) < len(prompts) and (len(running) < callers if callers else due[index] <= at):
                found.append({"due": at if callers else due[index], "first": 0.0, "end": 0.0})
                ids = self._runtime.tokenizer.encode(prompts[index]).input_ids.data[0].tolist()
                running[self._runtime.add(ids, config)] = (found[-1], [])
            if not running:
                time.sleep(max(0.0, due[len(found)] - at))
                continue
            self._runtime.step()
            at = time.perf_counter() - began
            for handle, (told, ids) in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        ids += output.generated_ids
                told["first"] = told["first"] or (at if ids else 0.0)
                if len(ids) >= tokens:
                    told["end"] = at
                    del running[handle]
        return found


def main() -> None:
    engine = BareEngine(json.loads(sys.argv[1]))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(engine.run(**json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
