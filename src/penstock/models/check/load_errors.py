"""Explains errors that occur while a model is loaded or runs, and gives advice."""

import re

from penstock.core.errors import (
    EngineFailed,
    InvalidRequest,
    InvalidTensor,
    PenstockError,
    RequestTooLarge,
    get_message,
)
from penstock.models.check.findings import Finding, warning
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.built_in import load_description

LOADING_ADVICE = {
    "unknown_operator": "The engine does not support an operator of the network. Try engine: openvino or onnx, "
    "or export the model again with an older opset and without custom operators.",
    "unknown_opset": "The file is newer than the installed runtime: pip install -U onnxruntime, or export with an "
    "older opset.",
    "engine_not_built": "See TensorRT's message: export the model differently, or set engine: onnx.",
    "open_shape": "Set the sizes of its inputs: docs/tensorrt.md.",
    "device_missing": "Set instances: {device: cpu} or device: auto in model.yaml; if the engine needs a GPU, set "
    "another engine.",
    "package_missing": "Install it into the environment that Penstock runs in; for PyTorch: "
    "pip install 'penstock-serve[torch]'.",
    "unsupported_precision": "Set another precision in model.yaml, or auto: docs/engines.md.",
    "no_tensor": "Export it so that all inputs and outputs are tensors; for models of scikit-learn: "
    "options={'zipmap': False}.",
    "torch_inputs": "Declare the file's inputs and outputs: docs/torch-models.md.",
    "invalid_tokenizer": "Copy the tokenizer.json that belongs to the model.",
    "invalid_labels": "Write one label per line into labels.txt, as many as the network's output has numbers.",
    "task_mismatch": "The network does not fit the task: correct task: in model.yaml (task: tensor serves any "
    "network unchanged), or export the model with the inputs and outputs that the task needs (docs/tasks.md).",
    "wrong_format": "Copy or export the file again.",
    "plugin_broken": "Reinstall the package that contains it, or correct its entry point: docs/engines.md.",
    "python_import": "Install the package, and name it in requirements.txt.",
    "python_load": "Correct the model's code.",
    "no_memory": "Free memory, or use fewer instances.",
    "load_failed": "See docs/models.md, and try the file with the runtime's own tools.",
}
# Patterns of messages of runtimes and Python, which have no codes. The first pattern that matches decides.
_CODES_BY_MESSAGE = (
    (
        r"No Op registered for|is not a registered function/op|No conversion rule found|[Uu]nsupported operator",
        "unknown_operator",
    ),
    (r"[Oo]pset \d+ is under development|Unsupported model IR version|opset version", "unknown_opset"),
    (r"No module named '(torch|openvino|onnxruntime|\w*transformers)", "package_missing"),
    (r"INVALID_PROTOBUF|Protobuf parsing failed", "wrong_format"),
    (r"ModuleNotFoundError|ImportError", "python_import"),
    (r"out of memory|bad_alloc|Failed to allocate|MemoryError", "no_memory"),
)
_NEWER = re.compile(r"Unsupported model IR version: \d+, max supported IR version: \d+|Opset \d+ is under development")
_CODE_FAULTS = re.compile(
    r"(NameError|ImportError|ModuleNotFoundError|AttributeError|SyntaxError|UnboundLocalError|TypeError)\b"
)


def explain_load_error(error: Exception) -> Finding:
    message = get_message(error)
    # An engine's message is shortened, but its cause may contain the whole text.
    whole = f"{message}\n{error.__cause__ or ''}"
    if found := _NEWER.search(whole):
        message = (
            f"{error.fields.get('file') or message.partition(': ')[0]}: {found[0]}"
            if isinstance(error, PenstockError)
            else found[0]
        )
    if code := _finding_code(error, whole):
        return Finding(code, message, LOADING_ADVICE[code])
    if isinstance(error, EngineFailed | InvalidTensor):
        what = f"the model's first run, on zeros, with size 8 for each dynamic dimension, fails: {message}"
        advice = (
            "Set is_batched: true if the first dimension is a batch, or warm_up: false if the model needs other sizes."
        )
        return Finding("warm_up_failed", what, advice)
    return Finding("load_failed", message, LOADING_ADVICE["load_failed"])


def explain_trial_error(error: Exception, settings: ModelSettings) -> Finding:
    """Explain an error of the sample request: a problem if the model is faulty, a warning if the request may be."""
    message = get_message(error)
    reason = error.reason if isinstance(error, PenstockError) else ""
    if isinstance(error, InvalidRequest | RequestTooLarge):
        what = f"the model loads, but rejects the sample request: {message}"
        return warning(
            "sample_refused", what, "This is not a problem if the model rightly rejects zeros or a short text."
        )
    if reason == "process_ended":
        return Finding("crashed", f"the model's process ended on a request: {message}", "Correct the model's code.")
    if reason == "output_mismatch":
        advice = "Correct the method infer or python.outputs in model.yaml, so that both agree."
        return Finding("output_mismatch", message, advice)
    if settings.engine == "python":
        if _CODE_FAULTS.search(message):
            return Finding("trial_failed", message, "Correct the model's code.")
    elif load_description(settings.task).has_real_samples or settings.warm_up:
        return Finding(
            "trial_failed", f"a request fails: {message}", "Correct the model, which loads but cannot answer."
        )
    what = f"a request with zeros fails: {message}"
    advice = "This is not a problem if the model rightly rejects zeros; it may raise InvalidTensor for invalid inputs."
    return warning("trial_failed", what, advice)


def _finding_code(error: Exception, whole: str) -> str:
    """Return the finding's code: the error's reason, or else a code derived from the error's message."""
    reason = error.reason if isinstance(error, PenstockError) else ""
    if reason not in LOADING_ADVICE or reason == "python_load":
        codes = (code for pattern, code in _CODES_BY_MESSAGE if re.search(pattern, whole))
        return next(codes, reason if reason in LOADING_ADVICE else "")
    return reason
