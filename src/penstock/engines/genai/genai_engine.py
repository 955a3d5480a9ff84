"""The worker's side of a model that OpenVINO GenAI runs in a separate process."""

import atexit
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.core.error_text import shorten
from penstock.core.errors import ConfigError, EngineFailed, PenstockError, RequestTooLarge
from penstock.core.generation import Generation, GenerationState, GenerationStep, Progress
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, TensorSpec
from penstock.engines.engine_options import GenaiOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.genai.genai_messages import pack_generation, unpack_step
from penstock.engines.genai.genai_process import GenerationProcess
from penstock.engines.hosting.hosted_process import HostProgram
from penstock.engines.hosting.process_supervisor import ProcessSupervisor

HOST = "penstock.engines.genai.genai_host"
FINAL_OUTPUT_S = 5.0  # time to read the last output of a process that failed to load
CLOSE_S = 5.0
MAX_PROMPT_BYTES = 8 * 1024 * 1024
MAX_TRIES = 2  # attempts to run a generation, if the model's process ends before the generation has started

now = time.monotonic


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """The limits on the length and number of a model's generations."""

    max_context: int | None = None  # tokens of prompt and answer together; None: the model's own limit
    max_running: int = 64  # sequences that run at once


@dataclass(slots=True)
class _WantedGeneration:
    """A requested generation that has not ended."""

    fields: dict[str, Any]
    has_joined: bool = False
    tries: int = 0


class GenaiEngine:
    """Runs generations in a separate process.

    If the process ends, running generations fail, and waiting generations run in the process that replaces it.
    """

    def __init__(
        self,
        spec: EngineSpec,
        options: GenaiOptions,
        limits: GenerationLimits,
        *,
        hang_s: float = 300.0,
        load_s: float = 300.0,
    ) -> None:
        """`hang_s`: the time after which a busy process that sends nothing is killed."""
        self._spec = spec
        self._hang_s, self._load_s = hang_s, load_s
        version = spec.file.parent
        self._program = HostProgram(HOST, version.parent.name, version.name, 0, spec.threads)
        self._settings = {
            "file": str(spec.file.absolute()),
            "precision": spec.precision,
            "threads": spec.threads,
            "max_context": limits.max_context or 0,
            "max_running": limits.max_running,
            **options.model_dump(),
        }
        self._supervisor = ProcessSupervisor(self._create_process, self._program.labels, load_s)
        self._report: Callable[[GenerationStep], None] = lambda step: None
        self._lock = threading.Lock()
        # Below: changed under the lock.
        self._generations: dict[int, _WantedGeneration] = {}
        self._process: GenerationProcess | None = None  # None unless the process has loaded the model
        self._load_problem = ""  # why the last process could not load the model; empty if it could
        self._totals_before = GenerationState()  # totals of the processes that have ended
        self._last_state = GenerationState()

    def load(self) -> Signature:
        atexit.register(self.close)
        self._supervisor.start()
        if problem := self._supervisor.wait_loaded(now() + self._load_s + FINAL_OUTPUT_S):
            self.close()
            raise ConfigError(f"{self._spec.file}: cannot be loaded: {problem}", file=str(self._spec.file))
        facts = self._supervisor.process().facts
        self.context_tokens: int = facts["context_tokens"]
        inputs = [TensorSpec("text_input", BYTES, (-1,)), TensorSpec("input_ids", "INT64", (-1,))]
        if facts["has_chat_template"]:
            inputs.append(TensorSpec("messages", BYTES, (1,)))
        outputs = (TensorSpec("text_output", BYTES, (-1,)),)
        return Signature(tuple(inputs), outputs, "openvino_genai", facts["precision"])

    def close(self) -> None:
        self._supervisor.request_stop()
        self._supervisor.end(now() + CLOSE_S)
        atexit.unregister(self.close)

    def start(self, report: Callable[[GenerationStep], None]) -> None:
        self._report = report

    def add(self, number: int, generation: Generation) -> None:
        generation_request = _WantedGeneration(pack_generation(number, generation))
        with self._lock:
            failure = self._find_refusal(generation_request)
            if failure is None:
                self._send_generation(generation_request)
                self._generations[number] = generation_request
        if failure is not None:
            self._report(self._make_step([Progress(number, failure=failure, is_over=True)]))

    def cancel(self, number: int) -> None:
        with self._lock:
            if self._generations.pop(number, None) is not None and self._process is not None:
                self._process.send("cancel", {"number": number})

    def probe(self) -> str:
        return self._supervisor.problem()

    # --- the supervisor's thread

    def _create_process(self) -> GenerationProcess:
        return GenerationProcess(self, self._program, self._settings, self._hang_s)

    def attach(self, process: GenerationProcess) -> None:
        """Use a process that has loaded the model: send all waiting generations to it."""
        with self._lock:
            self._process, self._load_problem = process, ""
            for generation_request in self._generations.values():
                self._send_generation(generation_request)

    def detach(self, process: GenerationProcess) -> None:
        """Fail the generations of a process that ended: the running ones, or all if it never loaded the model."""
        problem = f"the model's process ended while it generated: {process.end}"
        words = f"{problem}\n{process.last_lines}" if process.last_lines else problem
        failed = EngineFailed(shorten(words), reason="process_ended")
        was_loaded = bool(process.facts)
        with self._lock:
            self._process = None
            if not was_loaded:
                self._load_problem = process.end
            lost = [
                number
                for number, generation_request in self._generations.items()
                if generation_request.has_joined or generation_request.tries >= MAX_TRIES or not was_loaded
            ]
            for number in lost:
                del self._generations[number]
            self._totals_before, self._last_state = self._total_state(), GenerationState(waiting=len(self._generations))
        self._report(self._make_step([Progress(number, failure=failed, is_over=True) for number in lost]))

    def on_message(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "joined":
            with self._lock:
                for number in fields["numbers"]:
                    if (generation_request := self._generations.get(number)) is not None:
                        generation_request.has_joined = True
            self._report(self._make_step([Progress(number) for number in fields["numbers"]]))
            return
        step = unpack_step(fields)
        with self._lock:
            self._last_state = step.state
            # Nothing more is reported for cancelled generations.
            expected = [progress for progress in step.progress if progress.number in self._generations]
            for progress in expected:
                if progress.is_over:
                    del self._generations[progress.number]
        self._report(self._make_step(expected))

    @property
    def is_busy(self) -> bool:
        return bool(self._generations)

    def _send_generation(self, generation_request: _WantedGeneration) -> None:
        if self._process is not None:
            generation_request.tries += 1
            self._process.send("add", generation_request.fields)

    def _find_refusal(self, generation_request: _WantedGeneration) -> PenstockError | None:
        if self._load_problem:
            return EngineFailed(f"the model's process has ended and is being restarted: {self._load_problem}")
        size = len(generation_request.fields["text"]) + sum(
            len(str(each)) for each in generation_request.fields["messages"]
        )
        if size > MAX_PROMPT_BYTES:
            return RequestTooLarge(f"a prompt may have at most {MAX_PROMPT_BYTES} characters; this one has {size}")
        return None

    def _make_step(self, progress: list[Progress]) -> GenerationStep:
        return GenerationStep(progress, self._total_state())

    def _total_state(self) -> GenerationState:
        """Return the current process's last reported state, with the counters of earlier processes added."""
        before, last = self._totals_before, self._last_state
        return GenerationState(
            last.running,
            last.waiting,
            last.cache_blocks,
            last.cache_blocks_used,
            before.steps + last.steps,
            before.prompt_tokens + last.prompt_tokens,
            last.cached_tokens if last.cached_tokens < 0 else max(0, before.cached_tokens) + last.cached_tokens,
            before.generated_tokens + last.generated_tokens,
            before.preemptions + last.preemptions,
        )
