"""Opens folders of sentence-transformers models and of transformers' sequence classifiers, from safetensors only.

This module downloads nothing, reads no pickles, and runs no code from the folder.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.core.tensors import TensorSpec
from penstock.engines.checkpoint import CLASSIFIER, Checkpoint, file_error, read_json
from penstock.engines.torch.torch_devices import Target
from penstock.engines.torch.torch_model import IDS, MASK, TYPES, IdLimit, TorchModel

EMBEDDING, LOGITS = "sentence_embedding", "logits"
ANY_ID = 2**63
# Modules of the library that import no class by name, except for Dense's activation, which is checked.
MODULES = (
    "Transformer",
    "Pooling",
    "Dense",
    "Normalize",
    "LayerNorm",
    "Dropout",
    "WeightedLayerPooling",
    "CNN",
    "LSTM",
)


class SentenceEncoder(torch.nn.Module):
    """Runs the modules of sentence-transformers in order: the first in the chosen precision, the others in FP32."""

    def __init__(self, modules: Sequence[Any]) -> None:
        super().__init__()
        self.encoder = modules[0]
        self.other_modules = torch.nn.ModuleList(modules[1:]).float()

    def forward(self, features: dict[str, Any]) -> Any:
        found = self.encoder(features)
        found = {
            name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in found.items()
        }
        for module in self.other_modules:
            found = module(found)
        return found[EMBEDDING]


class Classifier(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Any]) -> Any:
        return self.model(**features).logits.float()


def open_sentence_encoder(folder: Path, target: Target) -> TorchModel:
    parts = _check_modules(folder)
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedModel

    _silence_library()
    with _check_shapes(folder):
        loaded = SentenceTransformer(
            str(folder),
            device=target.name,
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"dtype": target.dtype, "use_safetensors": True},
        )
    backbone = next(part for part in loaded.modules() if isinstance(part, PreTrainedModel))
    _check_weights(parts[0], backbone)
    encoder = SentenceEncoder(list(loaded.children())).to(target.device).eval()
    return _make_torch_model(folder, encoder, backbone, EMBEDDING, target)


def open_classifier(folder: Path, target: Target) -> TorchModel:
    checkpoint = Checkpoint.read(folder)
    if not checkpoint.is_classifier:
        raise file_error(
            folder / "config.json",
            f"this is {', '.join(checkpoint.architectures) or 'a nameless model'}; only …{CLASSIFIER} is supported. "
            "Use file: modules.json for a sentence encoder, and a .pt2 file for other models",
        )
    _check_safe(folder, [folder])
    from transformers import AutoModelForSequenceClassification

    _silence_library()
    with _check_shapes(folder):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=target.dtype,
            output_loading_info=True,
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"{folder}: its weights are incomplete: {missing[0]} and {len(missing) - 1} more are missing")
    return _make_torch_model(folder, Classifier(model.to(target.device)).eval(), model, LOGITS, target)


def _make_torch_model(folder: Path, module: Any, backbone: Any, output: str, target: Target) -> TorchModel:
    _copy_into_memory(module)
    has_types = TYPES in inspect.signature(backbone.forward).parameters
    types = getattr(backbone.config, "type_vocab_size", 0) or 0
    names = [IDS, MASK, TYPES] if has_types and types > 1 else [IDS, MASK]

    def forward(tensors: Sequence[Any]) -> Any:
        return module(dict(zip(names, tensors, strict=True)))

    vocabulary = getattr(backbone.get_input_embeddings(), "num_embeddings", ANY_ID)
    limits = [IdLimit(IDS, vocabulary, _max_positions(backbone))]
    if TYPES in names:
        limits.append(IdLimit(TYPES, types))
    with torch.inference_mode():
        found = forward([torch.ones((1, 4), dtype=torch.int64, device=target.device)] * len(names))
    if found.dim() != 2:
        raise ConfigError(f"{folder}: the model's {output} has {found.dim()} dimensions; it must be [batch, width]")
    return TorchModel(
        tuple(TensorSpec(name, "INT64", (-1, -1)) for name in names),
        (TensorSpec(output, "FP32", (-1, found.shape[1])),),
        target.precision if target.precision != "auto" else "fp32",
        module,
        forward,
        limits=tuple(limits),
    )


def _copy_into_memory(module: Any) -> None:
    """Copy CPU weights into memory: while they are mapped from the file, a change of the file would affect them."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def _max_positions(backbone: Any) -> int:
    """Return the most tokens that the model's table of positions allows in a row, or 0 if it has no such table."""
    for name, part in backbone.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, torch.nn.Embedding):
            # In RoBERTa and similar models, the positions start after that of the padding.
            return int(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    return 0


def _check_modules(folder: Path) -> list[Path]:
    """Check modules.json; return the folders of its modules, in order."""
    file = folder / "modules.json"
    try:
        modules = [(str(each["type"]), PurePosixPath(each["path"])) for each in read_json(file)]
    except (TypeError, KeyError, AttributeError) as error:
        raise file_error(file, "does not have sentence-transformers' format") from error
    for kind, path in modules:
        package, _, name = kind.rpartition(".")
        if package.partition(".")[0] != "sentence_transformers" or name not in MODULES:
            served = f"supported are {', '.join(MODULES)} of sentence-transformers"
            raise file_error(file, f"the module {kind} is not supported; {served}")
        if path.is_absolute() or ".." in path.parts:
            raise file_error(file, f"the path {path} leads out of the folder")
    if not modules or not modules[0][0].endswith(".Transformer"):
        raise file_error(file, "its first module must be a Transformer")
    if not any(kind.endswith("Pooling") for kind, _ in modules):
        raise file_error(file, "no module pools the tokens into one vector; for a cross-encoder use file: config.json")
    parts = [folder / path for _, path in modules]
    _check_safe(folder, parts)
    for part, (kind, _) in zip(parts, modules, strict=True):
        if kind.endswith(".Dense"):
            _check_dense(part / "config.json")
    return parts


def _check_dense(file: Path) -> None:
    """Raise ConfigError if a Dense module's activation is not PyTorch's: sentence-transformers would use Tanh."""
    activation = str(read_json(file).get("activation_function", "torch.nn."))
    if not activation.startswith("torch.nn."):
        raise file_error(file, f"the activation {activation} is not PyTorch's own")


def _check_safe(folder: Path, parts: Iterable[Path]) -> None:
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder}: this is an adapter; merge it into its model (merge_and_unload) and save that")
    for part in parts:
        pickles = sorted([*part.glob("*.bin"), *part.glob("*.pth"), *part.glob("*.pt")])
        if pickles and not list(part.glob("*.safetensors")):
            raise file_error(
                pickles[0],
                "is not loaded, because it is a pickle, which may run code while it is read; if you trust the model, "
                "load it with transformers and save it again, which writes model.safetensors",
            )


@contextmanager
def _check_shapes(folder: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ConfigError(
            f"{folder}: its weights do not have the shapes in config.json: use the config.json saved with them"
        ) from error


def _check_weights(folder: Path, backbone: Any) -> None:
    """Raise ConfigError if most weights are missing, because transformers would silently use random weights."""
    from safetensors import safe_open

    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                parts = name.split(".")
                found |= {".".join(parts[start:]) for start in range(len(parts))}
    wanted = [name for name, _ in backbone.named_parameters()]
    # Half are enough, because a model may have unused parts, and older files name some weights differently.
    if sum(name in found for name in wanted) < len(wanted) / 2:
        raise ConfigError(
            f"{folder}: its weights do not belong to a {type(backbone).__name__}: correct architectures in config.json"
        )


def _silence_library() -> None:
    """Silence the progress bars and advice of transformers, which would appear between the lines of the log."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
