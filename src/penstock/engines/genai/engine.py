"""A model that generates text, by OpenVINO GenAI in a process of its own: what the worker has of it."""

import atexit
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.error_text import shorten
from penstock.core.errors import ConfigError, EngineFailed, PenstockError, RequestTooLarge
from penstock.core.generation import Generation, GenerationStanding, GenerationStep, Progress
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, Array, TensorSpec
from penstock.engines.base import EngineSpec
from penstock.engines.genai.messages import pack_generation, unpack_step
from penstock.engines.genai.process import GenerationProcess
from penstock.engines.hosting.hosted import HostProgram
from penstock.engines.hosting.keeper import ProcessKeeper
from penstock.engines.options import GenaiOptions

HOST = "penstock.engines.genai.host"
LAST_WORDS_S = 5.0
CLOSE_S = 5.0
MAX_PROMPT_BYTES = 8 * 1024 * 1024
MAX_TRIES = 2  # of a generation whose process ended before it had joined

now = time.monotonic


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """What a request may ask for at most."""

    max_context: int | None = None  # tokens of prompt and answer; None: as many as the model was made for
    max_running: int = 64  # sequences at once


@dataclass(slots=True)
class _Wanted:
    """A generation that is not over."""

    fields: dict[str, Any]
    has_joined: bool = False
    tries: int = 0


class GenaiEngine:
    """What has joined when the process ends has failed; what waits goes on in the next process."""

    def __init__(
        self,
        spec: EngineSpec,
        options: GenaiOptions,
        limits: GenerationLimits,
        *,
        hang_s: float = 300.0,
        load_s: float = 300.0,
    ) -> None:
        """`hang_s`: a process that has told nothing for so long, though it is asked, is ended."""
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
        self._keeper = ProcessKeeper(self._make, self._program.labels, load_s)
        self._tell: Callable[[GenerationStep], None] = lambda step: None
        self._lock = threading.Lock()
        # Below: changed under the lock.
        self._asked: dict[int, _Wanted] = {}
        self._process: GenerationProcess | None = None  # loaded
        self._down = ""  # why there is none, where that will not change soon
        self._base = GenerationStanding()  # what processes that have ended had counted
        self._last = GenerationStanding()

    # --- Engine

    def load(self) -> Signature:
        atexit.register(self.close)
        self._keeper.start()
        if problem := self._keeper.wait_loaded(now() + self._load_s + LAST_WORDS_S):
            self.close()
            raise ConfigError(f"{self._spec.file}: cannot be loaded: {problem}", file=str(self._spec.file))
        facts = self._keeper.process().facts
        self.context_tokens: int = facts["context_tokens"]
        inputs = [TensorSpec("text_input", BYTES, (-1,)), TensorSpec("input_ids", "INT64", (-1,))]
        if facts["has_chat_template"]:
            inputs.append(TensorSpec("messages", BYTES, (1,)))
        outputs = (TensorSpec("text_output", BYTES, (-1,)),)
        return Signature(tuple(inputs), outputs, "openvino_genai", facts["precision"])

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        """The process has done so as it was loaded."""

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        raise EngineFailed("this model generates: engine: genai needs task: generate")

    def close(self) -> None:
        self._keeper.ask_to_stop()
        self._keeper.end(now() + CLOSE_S)
        atexit.unregister(self.close)

    # --- GeneratingEngine

    def start(self, tell: Callable[[GenerationStep], None]) -> None:
        self._tell = tell

    def add(self, number: int, generation: Generation) -> None:
        asked = _Wanted(pack_generation(number, generation))
        with self._lock:
            failure = self._refusal(asked)
            if failure is None:
                self._send(asked)
                self._asked[number] = asked
        if failure is not None:
            self._tell(self._step([Progress(number, failure=failure, is_over=True)]))

    def cancel(self, number: int) -> None:
        with self._lock:
            if self._asked.pop(number, None) is not None and self._process is not None:
                self._process.send("cancel", {"number": number})

    def probe(self, instance: int) -> str:
        return self._keeper.problem()

    # --- the keeper's thread

    def _make(self) -> GenerationProcess:
        return GenerationProcess(self, self._program, self._settings, self._hang_s)

    def attach(self, process: GenerationProcess) -> None:
        """It has loaded the model: what waits goes there."""
        with self._lock:
            self._process, self._down = process, ""
            for asked in self._asked.values():
                self._send(asked)

    def detach(self, process: GenerationProcess) -> None:
        """It has ended. What does not load will not soon do so, and nobody waits for it."""
        said = f"the model's process ended while it generated: {process.end}"
        words = f"{said}\n{process.words}" if process.words else said
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
            self._base, self._last = self._total(), GenerationStanding(waiting=len(self._asked))
        self._tell(self._step([Progress(number, failure=failed, is_over=True) for number in lost]))

    def hear(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "joined":
            with self._lock:
                for number in fields["numbers"]:
                    if (asked := self._asked.get(number)) is not None:
                        asked.has_joined = True
            self._tell(self._step([Progress(number) for number in fields["numbers"]]))
            return
        step = unpack_step(fields)
        with self._lock:
            self._last = step.standing
            # Of what was cancelled meanwhile nothing more is told.
            told = [progress for progress in step.progress if progress.number in self._asked]
            for progress in told:
                if progress.is_over:
                    del self._asked[progress.number]
        self._tell(self._step(told))

    @property
    def is_busy(self) -> bool:
        return bool(self._asked)

    def _send(self, asked: _Wanted) -> None:
        if self._process is not None:
            asked.tries += 1
            self._process.send("add", asked.fields)

    def _refusal(self, asked: _Wanted) -> PenstockError | None:
        if self._down:
            return EngineFailed(f"the model's process is down and is being started again: {self._down}")
        size = len(asked.fields["text"]) + sum(len(str(each)) for each in asked.fields["messages"])
        if size > MAX_PROMPT_BYTES:
            return RequestTooLarge(f"a prompt may have {MAX_PROMPT_BYTES} characters; this has {size}")
        return None

    def _step(self, progress: list[Progress]) -> GenerationStep:
        return GenerationStep(progress, self._total())

    def _total(self) -> GenerationStanding:
        """What counts up goes on counting when a process takes another's place."""
        base, last = self._base, self._last
        return GenerationStanding(
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
