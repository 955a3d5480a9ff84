"""What an engine or a task says as a model is loaded or run, in words that say what to do."""

import re

from penstock.core.errors import EngineFailed, InvalidRequest, InvalidTensor, PenstockError, RequestTooLarge, message_of
from penstock.models.check.findings import Finding, warning
from penstock.models.settings import ModelSettings

LOADING_ADVICE = {
    "unknown_operator": "The network has an operator that this engine does not know. Try the other (engine: openvino "
    "or onnx), or export the model anew with an older opset and without custom operators.",
    "unknown_opset": "The file is newer than the installed runtime: pip install -U onnxruntime, or export with an "
    "older opset.",
    "engine_not_built": "TensorRT says what it cannot do with the file: export it otherwise, or say engine: onnx.",
    "open_shape": "Say the sizes that it takes: docs/tensorrt.md.",
    "device_missing": "Say instances: {device: cpu} in model.yaml, or device: auto; where the engine needs a GPU, "
    "another engine.",
    "package_missing": "Install it into the environment that Penstock runs in; for PyTorch: "
    "pip install 'penstock-serve[torch]'.",
    "unsupported_precision": "Say another precision in model.yaml, or auto: docs/engines.md.",
    "no_tensor": "Export it so that all inputs and outputs are tensors; of scikit-learn's models: "
    "options={'zipmap': False}.",
    "torch_inputs": "Say what the file takes: docs/torch-models.md.",
    "invalid_tokenizer": "Copy the tokenizer.json that belongs to the model, or correct its name.",
    "invalid_labels": "One label a line in classify.labels, as many as the network's output is wide.",
    "task_mismatch": "The network does not fit the task: correct task: in model.yaml (task: tensor serves any network "
    "as it is), or export the model with the inputs and outputs that the task wants (docs/tasks.md).",
    "wrong_format": "Copy or export the file anew.",
    "plugin_broken": "Reinstall the package that brings it, or correct its entry point: docs/engines.md.",
    "python_import": "Install the package, and name it in requirements.txt.",
    "python_load": "Correct the model's code; the end of its traceback is above.",
    "no_memory": "Free memory, or use fewer instances.",
    "load_failed": "See docs/models.md, and try the file with the runtime's own tools.",
}
# What runtimes and Python itself say, which have no codes. The first that is found explains it.
_SAID_BY_OTHERS = (
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
    message = message_of(error)
    # An engine's own message is cut; what it was made from may say more.
    whole = f"{message}\n{error.__cause__ or ''}"
    if found := _NEWER.search(whole):
        message = (
            f"{error.fields.get('file') or message.partition(': ')[0]}: {found[0]}"
            if isinstance(error, PenstockError)
            else found[0]
        )
    if code := _code(error, whole):
        return Finding(code, message, LOADING_ADVICE[code])
    if isinstance(error, EngineFailed | InvalidTensor):
        what = f"its first run fails, with zeros and 8 for every size that the file leaves open: {message}"
        advice = (
            "Say is_batched: true where the first dimension is a batch, or warm_up: false where it takes other sizes."
        )
        return Finding("warm_up_failed", what, advice)
    return Finding("load_failed", message, LOADING_ADVICE["load_failed"])


def explain_trial_error(error: Exception, settings: ModelSettings) -> Finding:
    """What fails on a sample may be the sample's fault, except where the model answers wrongly, or dies."""
    message = message_of(error)
    reason = error.reason if isinstance(error, PenstockError) else ""
    if isinstance(error, InvalidRequest | RequestTooLarge):
        what = f"the model loads, and refuses the sample request: {message}"
        return warning("sample_refused", what, "Nothing to do if it is right to refuse zeros or a short text.")
    if reason == "process_ended":
        return Finding("crashed", f"the model's process ended on a request: {message}", "Correct the model's code.")
    if reason == "output_mismatch":
        advice = "Correct infer, or python.outputs in model.yaml, so that they agree."
        return Finding("output_mismatch", message, advice)
    if settings.engine == "python":
        if _CODE_FAULTS.search(message):
            return Finding("trial_failed", message, "Correct the model's code; the end of its traceback is above.")
    elif settings.task != "tensor" or settings.warm_up:
        return Finding("trial_failed", f"a request fails: {message}", "The model loads, but cannot answer.")
    what = f"a request with zeros fails: {message}"
    advice = "Nothing to do if the model is right; it may raise InvalidTensor for what it does not take."
    return warning("trial_failed", what, advice)


def _code(error: Exception, whole: str) -> str:
    """A model's own code fails for many reasons, so there what Python says goes first."""
    reason = error.reason if isinstance(error, PenstockError) else ""
    if reason not in LOADING_ADVICE or reason == "python_load":
        said = (code for pattern, code in _SAID_BY_OTHERS if re.search(pattern, whole))
        return next(said, reason if reason in LOADING_ADVICE else "")
    return reason
