"""The bare engine as a program: a line of JSON says what to generate, a line tells how it went.

    python -m benchmarks.suite.generation.bare <model.gguf> <settings as JSON>

No server, no wire: the pipeline's own loop in the only thread, with the settings that the served one has.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import openvino_genai


class BareEngine:
    def __init__(self, file: str, scheduler: dict[str, Any], properties: dict[str, Any]) -> None:
        config = openvino_genai.SchedulerConfig()
        for name, value in scheduler.items():
            setattr(config, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(file, config, "CPU", properties)
        self._added = 0

    def run(self, prompts: Sequence[str], tokens: int, callers: int, due: Sequence[float]) -> list[dict[str, Any]]:
        """By so many callers, each with its next prompt when it has its answer; without any, each when it is due."""
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        running: dict[Any, dict[str, Any]] = {}
        found: list[dict[str, Any]] = []
        began = time.perf_counter()
        while running or len(found) < len(prompts):
            at = time.perf_counter() - began
            while (index := len(found)) < len(prompts) and (len(running) < callers if callers else due[index] <= at):
                found.append({"due": at if callers else due[index], "first": 0.0, "end": 0.0, "ids": []})
                running[self._pipeline.add_request(self._added, prompts[index], config)] = found[-1]
                self._added += 1
            if not running:
                time.sleep(max(0.0, due[len(found)] - at))
                continue
            self._pipeline.step()
            self._read(running, tokens, time.perf_counter() - began)
        return found

    def _read(self, running: dict[Any, dict[str, Any]], tokens: int, at: float) -> None:
        for handle, told in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    told["ids"] += output.generated_ids
            if told["ids"] and not told["first"]:
                told["first"] = at
            if len(told["ids"]) >= tokens:
                told["end"] = at
                del running[handle]


def main() -> None:
    file, settings = sys.argv[1:]
    engine = BareEngine(file, **json.loads(settings))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(engine.run(**json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
