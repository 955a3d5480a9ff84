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
MAX_TRIES = 2  # how often a generation is sent to a process, if processes end before the generation joins

now = time.monotonic


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """The limits of a model's generations."""

    max_context: int | None = None  # tokens of prompt and answer together; None: the model's own limit
    max_running: int = 64  # sequences that run at once


@dataclass(slots=True)
class _WantedGeneration:
    """A requested generation that has not ended."""

    fields: dict[str, Any]
    has_joined: bool = False
    tries: int = 0


class GenaiEngine:
    """Runs generations in a process. If the process ends, running generations fail; waiting ones use the next one."""

    def __init__(
        self,
        spec: EngineSpec,
        options: GenaiOptions,
        limits: GenerationLimits,
        *,
        hang_s: float = 300.0,
        load_s: float = 300.0,
    ) -> None:
        """`hang_s`: a busy process that has sent nothing for this long is ended."""
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
        self._asked: dict[int, _WantedGeneration] = {}
        self._process: GenerationProcess | None = None  # None unless the process has loaded the model
        self._down = ""  # why no process runs, if the last one failed to load the model
        self._base = GenerationState()  # totals of the processes that have ended
        self._last = GenerationState()

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
        asked = _WantedGeneration(pack_generation(number, generation))
        with self._lock:
            failure = self._refusal_reason(asked)
            if failure is None:
                self._send_generation(asked)
                self._asked[number] = asked
        if failure is not None:
            self._report(self._to_step([Progress(number, failure=failure, is_over=True)]))

    def cancel(self, number: int) -> None:
        with self._lock:
            if self._asked.pop(number, None) is not None and self._process is not None:
                self._process.send("cancel", {"number": number})

    def probe(self) -> str:
        return self._supervisor.problem()

    # --- the supervisor's thread

    def _create_process(self) -> GenerationProcess:
        return GenerationProcess(self, self._program, self._settings, self._hang_s)

    def attach(self, process: GenerationProcess) -> None:
        """Use a process that has loaded the model: send all waiting generations to it."""
        with self._lock:
            self._process, self._down = process, ""
            for asked in self._asked.values():
                self._send_generation(asked)

    def detach(self, process: GenerationProcess) -> None:
        """Fail the generations of a process that ended; fail all generations if the process never loaded the model."""
        problem = f"the model's process ended while it generated: {process.end}"
        words = f"{problem}\n{process.words}" if process.words else problem
        failed = EngineFailed(shorten(words), reason="process_ended")
        was_loaded = bool(process.facts)
        with self._lock:
            self._process = None
            if not was_loaded:
                self._down = process.end
            lost = [
                number
                for number, asked in self._asked.items()
                if asked.has_joined or asked.tries >= MAX_TRIES or not was_loaded
            ]
            for number in lost:
                del self._asked[number]
            self._base, self._last = self._total_state(), GenerationState(waiting=len(self._asked))
        self._report(self._to_step([Progress(number, failure=failed, is_over=True) for number in lost]))

    def on_message(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "joined":
            with self._lock:
                for number in fields["numbers"]:
                    if (asked := self._asked.get(number)) is not None:
                        asked.has_joined = True
            self._report(self._to_step([Progress(number) for number in fields["numbers"]]))
            return
        step = unpack_step(fields)
        with self._lock:
            self._last = step.state
            # Nothing more is reported for cancelled generations.
            expected = [progress for progress in step.progress if progress.number in self._asked]
            for progress in expected:
                if progress.is_over:
                    del self._asked[progress.number]
        self._report(self._to_step(expected))

    @property
    def is_busy(self) -> bool:
        return bool(self._asked)

    def _send_generation(self, asked: _WantedGeneration) -> None:
        if self._process is not None:
            asked.tries += 1
            self._process.send("add", asked.fields)

    def _refusal_reason(self, asked: _WantedGeneration) -> PenstockError | None:
        if self._down:
            return EngineFailed(f"the model's process has ended and is being restarted: {self._down}")
        size = len(asked.fields["text"]) + sum(len(str(each)) for each in asked.fields["messages"])
        if size > MAX_PROMPT_BYTES:
            return RequestTooLarge(f"a prompt may have at most {MAX_PROMPT_BYTES} characters; this one has {size}")
        return None

    def _to_step(self, progress: list[Progress]) -> GenerationStep:
        return GenerationStep(progress, self._total_state())

    def _total_state(self) -> GenerationState:
        """Return the process's last state, with counters that include those of earlier processes."""
        base, last = self._base, self._last
        return GenerationState(
            last.running,
            last.waiting,
            last.cache_blocks,
            last.cache_blocks_used,
            base.steps + last.steps,
            base.prompt_tokens + last.prompt_tokens,
            last.cached_tokens if last.cached_tokens < 0 else max(0, base.cached_tokens) + last.cached_tokens,
            base.generated_tokens + last.generated_tokens,
            base.preemptions + last.preemptions,
        )
