"""The program that tries a model: loads a version as a worker does, and runs a sample request. It may crash or hang."""

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
from penstock.core.tensors import Array, Tensor, TensorSpec, from_array, is_shape_accepted, to_array
from penstock.models.check.findings import Finding, as_json, has_problem, warning
from penstock.models.check.load_errors import explain_load_error, explain_trial_error
from penstock.models.check.sample_requests import example_command, sample_inputs
from penstock.models.folder import model_files, read_version, size_bytes
from penstock.models.loading import LoadedBlock, load_block
from penstock.models.running import first_answers, infer
from penstock.tasks.base import TaskRequest
from penstock.tasks.built_in import load_description
from penstock.telemetry.gpus import open_gpus

STREAMED = 3  # number of answers that are read from a decoupled model


class Trial:
    """Loads one version of a model, runs sample requests, and reports problems."""

    def __init__(self, folder: Path, version: str, timeout_s: float) -> None:
        self._folder = folder
        self._version = version
        self._timeout_s = timeout_s
        self._is_late = False

    def run(self, report: Callable[[dict[str, object]], object]) -> None:
        """Run the trial; report each stage before it starts, and the model's properties and the findings at the end."""
        timer = threading.Timer(self._timeout_s, self._abort_hanging, [report])
        timer.daemon = True
        timer.start()
        facts: dict[str, object] = {}
        findings: list[Finding] = []
        report({"stage": "load"})
        start = time.perf_counter()
        try:
            block = load_block("blk-check", self._folder, self._version, Limits(), gpus=open_gpus())
        except Exception as error:  # noqa: BLE001 - a trial reports all errors of a model
            findings.append(self._timeout_finding(error) or explain_load_error(error))
        else:
            facts = _describe_block(block, time.perf_counter() - start)
            report({"stage": "request"})
            findings += self._send_sample(block, facts)
            block.engine.close()
        timer.cancel()
        report({"facts": facts, **as_json(findings)})

    def _send_sample(self, block: LoadedBlock, facts: dict[str, object]) -> list[Finding]:
        description = block.description
        inputs = sample_inputs(description.inputs, description.max_batch_size > 0)
        request = _make_request(inputs)
        task = load_description(description.settings.task)
        request.parameters = task.sample_parameters
        start = time.perf_counter()
        try:
            answers = first_answers(block, request, STREAMED, "check")
        except Exception as error:  # noqa: BLE001
            return [self._timeout_finding(error) or explain_trial_error(error, block.settings)]
        facts["example"] = example_command(
            description, inputs
        )  # an example that works, because the model has answered this request
        facts["request_ms"] = round((time.perf_counter() - start) * 1000, 1)
        if description.settings.is_decoupled:
            facts["answers"] = len(answers)
        findings = [found for tensors in answers for found in _compare_with_outputs(tensors, description.outputs)]
        if task.has_real_samples:  # other samples are zeros, by which a model may divide
            findings += _find_non_finite(answers)
        if description.max_batch_size > 1 and not has_problem(findings):
            findings += _try_batch(block, inputs)
        return findings

    def _timeout_finding(self, error: Exception) -> Finding | None:
        if not self._is_late:
            return None
        words = str(error).splitlines()
        # Show only the lines of the model's own code.
        places = [line.strip() for line in words if line.lstrip().startswith(f'File "{self._folder}')]
        where = "; it was running:" + "".join(f"\n{place}" for place in places) if places else f": {words[0]}"
        message = f"version {self._version} did not answer within {self._timeout_s:g} s{where}"
        return Finding("timed_out", message, "Find out why the model waits, or allow more time: --timeout SECONDS")

    def _abort_hanging(self, report: Callable[[dict[str, object]], object]) -> None:
        """Abort the hanging process (of a Python model, or else this one), so that Python writes its traceback."""
        self._is_late = True
        children = psutil.Process().children()
        for child in children:
            child.send_signal(signal.SIGABRT)
        if not children:
            report({"stage": "late"})
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGABRT)


def _make_request(inputs: Mapping[str, Array]) -> TaskRequest:
    return TaskRequest([from_array(name, array) for name, array in inputs.items()], [])


def _try_batch(block: LoadedBlock, inputs: Mapping[str, Array]) -> list[Finding]:
    """Run two sample requests as one batch, as a worker would join them."""
    if block.request_mode != "batches":  # requests of other models are never joined
        return []
    pieces = [block.task.prepare(_make_request(inputs)).pieces[0] for _ in range(2)]
    if pieces[0].key != pieces[1].key:
        return []
    try:
        infer(block, pieces)
    except Exception as error:  # noqa: BLE001
        message = f"a batch of two requests fails, so a worker would run each of them again alone: {error}"
        advice = (
            "Set is_batched: false if the first dimension is not a batch, or export the model with a dynamic batch."
        )
        return [warning("batch_failed", message, advice)]
    return []


def _compare_with_outputs(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Finding]:
    """Return a warning for each tensor of the answer that differs from the model's declared output."""
    declared = {spec.name: spec for spec in specs}
    found = []
    for tensor in tensors:
        spec = declared[tensor.name]
        if tensor.datatype != spec.datatype or not is_shape_accepted(tensor.shape, spec.shape):
            message = (
                f"output '{tensor.name}' is {tensor.datatype} {list(tensor.shape)}, "
                f"but the model declares {spec.datatype} {list(spec.shape)}"
            )
            advice = "Clients rely on the declared outputs: export it again with the right shapes."
            found.append(warning("output_differs", message, advice))
    return found


def _find_non_finite(answers: Sequence[Sequence[Tensor]]) -> list[Finding]:
    floats = [tensor for tensor in chain(*answers) if tensor.datatype in ("FP16", "FP32", "FP64", "BF16")]
    wrong = [tensor.name for tensor in floats if not np.isfinite(to_array(tensor).astype(np.float64)).all()]
    advice = "The weights may be broken, or a conversion to FP16 or INT8 may have gone wrong."
    return [warning("not_finite", f"output '{name}' has infinite or NaN values", advice) for name in wrong]


def _describe_block(block: LoadedBlock, load_s: float) -> dict[str, object]:
    description = block.description
    folder = block.spec.folder.parent
    return {
        "platform": description.platform,
        "precision": description.precision,
        "device": description.device,
        "note": description.note,
        "instances": description.instances,
        "inputs": [f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in description.inputs],
        "outputs": [f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in description.outputs],
        "max_batch_size": description.max_batch_size,
        "load_s": round(load_s, 3),
        "memory_bytes": block.size_bytes,
        "device_memory_bytes": block.device_bytes,
        "file_bytes": size_bytes(model_files(read_version(folder, description.version), description.version)),
    }


def main() -> None:
    folder, version, timeout_s, fd = sys.argv[1:]
    faulthandler.enable(all_threads=False)
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    with os.fdopen(int(fd), "w", encoding="utf-8", buffering=1) as pipe:
        Trial(Path(folder), version, float(timeout_s)).run(lambda step: pipe.write(json.dumps(step) + "\n"))


if __name__ == "__main__":
    main()
