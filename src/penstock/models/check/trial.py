"""One version of a model, loaded as a worker would and asked once, in a process that it may crash or hang."""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import psutil

from penstock.core.config import Limits
from penstock.core.settings import GENERATE
from penstock.core.tensors import Array, Tensor, TensorSpec, fits, from_array, to_array
from penstock.engines.base import ContextEngine
from penstock.models.check.findings import Finding, as_json, has_problem, warning
from penstock.models.check.load_errors import explain_load_error, explain_trial_error
from penstock.models.check.samples import example_command, sample_inputs
from penstock.models.folder import model_files, read_version, size_bytes
from penstock.models.loading import LoadedBlock, load_block
from penstock.models.running import first_answers, infer
from penstock.tasks.base import TaskRequest
from penstock.telemetry.devices import open_gpus

STREAMED = 3  # answers that a decoupled model is asked for
GENERATED = 16  # tokens that a model which generates text is asked for


class Trial:
    def __init__(self, folder: Path, version: str, timeout_s: float) -> None:
        self._folder = folder
        self._version = version
        self._timeout_s = timeout_s
        self._is_late = False

    def run(self, tell: Callable[[dict[str, object]], object]) -> None:
        """Tells what it does before it does it, and at the end what it found."""
        timer = threading.Timer(self._timeout_s, self._wake, [tell])
        timer.daemon = True
        timer.start()
        facts: dict[str, object] = {}
        findings: list[Finding] = []
        tell({"stage": "load"})
        start = time.perf_counter()
        try:
            block = load_block("blk-check", self._folder, self._version, Limits(), gpus=open_gpus())
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a model is what this reports
            findings.append(self._late(error) or explain_load_error(error))
        else:
            facts = _facts(block, time.perf_counter() - start)
            tell({"stage": "request"})
            findings += self._ask(block, facts)
            block.engine.close()
        timer.cancel()
        tell({"facts": facts, **as_json(findings)})

    def _ask(self, block: LoadedBlock, facts: dict[str, object]) -> list[Finding]:
        description = block.description
        inputs = sample_inputs(description.inputs, description.max_batch_size > 0)
        request = _request(inputs)
        if description.settings.task == GENERATE:
            request.parameters = {"max_tokens": GENERATED}
        start = time.perf_counter()
        try:
            answers = first_answers(block, request, STREAMED, "check")
        except Exception as error:  # noqa: BLE001
            return [self._late(error) or explain_trial_error(error, block.settings)]
        facts["example"] = example_command(description, inputs)  # what was answered here is answered there
        facts["request_ms"] = round((time.perf_counter() - start) * 1000, 1)
        if description.settings.is_decoupled:
            facts["answers"] = len(answers)
        findings = [found for tensors in answers for found in _compare(tensors, description.outputs)]
        if description.settings.task != "tensor":  # zeros may well be divided by
            findings += _look_for_no_numbers(answers)
        if description.max_batch_size > 1 and not has_problem(findings):
            findings += _try_batch(block, inputs)
        return findings

    def _late(self, error: Exception) -> Finding | None:
        if not self._is_late:
            return None
        words = str(error).splitlines()
        # Of a process that was ended so, the rest tells of Penstock's own code.
        places = [line.strip() for line in words if line.lstrip().startswith(f'File "{self._folder}')]
        where = "; it was at:" + "".join(f"\n{place}" for place in places) if places else f": {words[0]}"
        message = f"version {self._version} did not answer within {self._timeout_s:g} s{where}"
        return Finding("timed_out", message, "See where it waits, or give it longer: --timeout SECONDS")

    def _wake(self, tell: Callable[[dict[str, object]], object]) -> None:
        """What hangs is ended so that Python writes where it was: a Python model's process, or this one."""
        self._is_late = True
        children = psutil.Process().children()
        for child in children:
            child.send_signal(signal.SIGABRT)
        if not children:
            tell({"stage": "late"})
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGABRT)


def _request(inputs: Mapping[str, Array]) -> TaskRequest:
    return TaskRequest([from_array(name, array) for name, array in inputs.items()], [])


def _try_batch(block: LoadedBlock, inputs: Mapping[str, Array]) -> list[Finding]:
    """Two requests at once, as the batcher joins them."""
    if isinstance(block.engine, ContextEngine):  # such a model's requests are never joined
        return []
    pieces = [block.task.prepare(_request(inputs)).pieces[0] for _ in range(2)]
    if pieces[0].key != pieces[1].key:
        return []
    try:
        infer(block, pieces)
    except Exception as error:  # noqa: BLE001
        message = f"two requests joined into one batch fail, so each is run again alone: {error}"
        advice = (
            "Say is_batched: false where the first dimension is no batch, or export the model with a dynamic batch."
        )
        return [warning("batch_failed", message, advice)]
    return []


def _compare(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Finding]:
    """Holds what a model gave against what it says that it gives."""
    told = {spec.name: spec for spec in specs}
    found = []
    for tensor in tensors:
        spec = told[tensor.name]
        if tensor.datatype != spec.datatype or not fits(tensor.shape, spec.shape):
            message = (
                f"output '{tensor.name}' is {tensor.datatype} {list(tensor.shape)}, "
                f"but the model says {spec.datatype} {list(spec.shape)}"
            )
            advice = "Clients go by what the model says: export it anew with the right shapes."
            found.append(warning("output_differs", message, advice))
    return found


def _look_for_no_numbers(answers: Sequence[Sequence[Tensor]]) -> list[Finding]:
    floats = [tensor for tensor in chain(*answers) if tensor.datatype in ("FP16", "FP32", "FP64", "BF16")]
    wrong = [tensor.name for tensor in floats if not np.isfinite(to_array(tensor).astype(np.float64)).all()]
    advice = "The weights may be broken, or a conversion to FP16 or INT8 may have gone wrong."
    return [warning("not_finite", f"output '{name}' has infinities or no numbers", advice) for name in wrong]


def _facts(block: LoadedBlock, load_s: float) -> dict[str, object]:
    told = block.description
    folder = block.spec.folder.parent
    return {
        "platform": told.platform,
        "precision": told.precision,
        "device": told.device,
        "note": told.note,
        "instances": told.instances,
        "inputs": [f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in told.inputs],
        "outputs": [f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in told.outputs],
        "max_batch_size": told.max_batch_size,
        "load_s": round(load_s, 3),
        "memory_bytes": block.size_bytes,
        "device_memory_bytes": block.device_bytes,
        "file_bytes": size_bytes(model_files(read_version(folder, told.version), told.version)),
    }


def main() -> None:
    folder, version, timeout_s, fd = sys.argv[1:]
    faulthandler.enable(all_threads=False)
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    with os.fdopen(int(fd), "w", encoding="utf-8", buffering=1) as pipe:
        Trial(Path(folder), version, float(timeout_s)).run(lambda told: pipe.write(json.dumps(told) + "\n"))


if __name__ == "__main__":
    main()
