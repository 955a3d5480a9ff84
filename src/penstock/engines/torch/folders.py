"""Folders of sentence-transformers and of transformers' sequence classifiers, from local safetensors alone.

Nothing is fetched, no pickle is read, and no code that lies in the folder is run.
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
from penstock.engines.torch.devices import Target
from penstock.engines.torch.model import IDS, MASK, TYPES, IdLimit, TorchModel

EMBEDDING, LOGITS = "sentence_embedding", "logits"
ANY_ID = 2**63
# Of the library's own; their settings name nothing that is imported, but for Dense's activation.
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
    """The library's modules one after the other; all but the first in FP32, since they sum and divide."""

    def __init__(self, modules: Sequence[Any]) -> None:
        super().__init__()
        self.encoder = modules[0]
        self.rest = torch.nn.ModuleList(modules[1:]).float()

    def forward(self, features: dict[str, Any]) -> Any:
        found = self.encoder(features)
        found = {
            name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in found.items()
        }
        for module in self.rest:
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

    _be_quiet()
    with _fitting(folder):
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
    return _described(folder, encoder, backbone, EMBEDDING, target)


def open_classifier(folder: Path, target: Target) -> TorchModel:
    checkpoint = Checkpoint.read(folder)
    if not checkpoint.is_classifier:
        raise file_error(
            folder / "config.json",
            f"this is {', '.join(checkpoint.architectures) or 'a model without a name'}; served are …{CLASSIFIER}. "
            "An encoder of sentences is served with file: modules.json, another model as a .pt2 file",
        )
    _check_safe(folder, [folder])
    from transformers import AutoModelForSequenceClassification

    _be_quiet()
    with _fitting(folder):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=target.dtype,
            output_loading_info=True,
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"{folder}: its weights have no {missing[0]} (nor {len(missing) - 1} more); it is not whole")
    return _described(folder, Classifier(model.to(target.device)).eval(), model, LOGITS, target)


def _described(folder: Path, module: Any, backbone: Any, output: str, target: Target) -> TorchModel:
    _take_in(module)
    has_types = TYPES in inspect.signature(backbone.forward).parameters
    types = getattr(backbone.config, "type_vocab_size", 0) or 0
    names = [IDS, MASK, TYPES] if has_types and types > 1 else [IDS, MASK]

    def call(tensors: Sequence[Any]) -> Any:
        return module(dict(zip(names, tensors, strict=True)))

    vocabulary = getattr(backbone.get_input_embeddings(), "num_embeddings", ANY_ID)
    limits = [IdLimit(IDS, vocabulary, _positions(backbone))]
    if TYPES in names:
        limits.append(IdLimit(TYPES, types))
    with torch.inference_mode():
        found = call([torch.ones((1, 4), dtype=torch.int64, device=target.device)] * len(names))
    if found.dim() != 2:
        raise ConfigError(f"{folder}: gives {output} with {found.dim()} dimensions, not [batch, width]")
    return TorchModel(
        tuple(TensorSpec(name, "INT64", (-1, -1)) for name in names),
        (TensorSpec(output, "FP32", (-1, found.shape[1])),),
        target.precision if target.precision != "auto" else "fp32",
        module,
        call,
        limits=tuple(limits),
    )


def _take_in(module: Any) -> None:
    """Weights may still lie in their file: who writes to that would change them, and who cuts it end the process."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def _positions(backbone: Any) -> int:
    """Tokens that a row may have; 0: the model has no table of positions."""
    for name, part in backbone.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, torch.nn.Embedding):
            # RoBERTa and its kin count from behind the padding's.
            return int(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    return 0


def _check_modules(folder: Path) -> list[Path]:
    """The folders of the modules, in their order."""
    file = folder / "modules.json"
    try:
        modules = [(str(each["type"]), PurePosixPath(each["path"])) for each in read_json(file)]
    except (TypeError, KeyError, AttributeError) as error:
        raise file_error(file, "is not as sentence-transformers writes it") from error
    for kind, path in modules:
        package, _, name = kind.rpartition(".")
        if package.partition(".")[0] != "sentence_transformers" or name not in MODULES:
            served = f"served are {', '.join(MODULES)} of sentence-transformers"
            raise file_error(file, f"the module {kind} is not served; {served}")
        if path.is_absolute() or ".." in path.parts:
            raise file_error(file, f"the path {path} leads out of the folder")
    if not modules or not modules[0][0].endswith(".Transformer"):
        raise file_error(file, "its first module must be a Transformer")
    if not any(kind.endswith("Pooling") for kind, _ in modules):
        raise file_error(
            file, "no module pools the tokens into one vector; a cross-encoder is served with file: config.json"
        )
    parts = [folder / path for _, path in modules]
    _check_safe(folder, parts)
    for part, (kind, _) in zip(parts, modules, strict=True):
        if kind.endswith(".Dense"):
            _check_dense(part / "config.json")
    return parts


def _check_dense(file: Path) -> None:
    """The library would take Tanh in place of what it does not trust, and give other vectors."""
    activation = str(read_json(file).get("activation_function", "torch.nn."))
    if not activation.startswith("torch.nn."):
        raise file_error(file, f"the activation {activation} is not PyTorch's own")


def _check_safe(folder: Path, parts: Iterable[Path]) -> None:
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder}: is an adapter; merge it into its model (merge_and_unload) and save that")
    for part in parts:
        pickles = sorted([*part.glob("*.bin"), *part.glob("*.pth"), *part.glob("*.pt")])
        if pickles and not list(part.glob("*.safetensors")):
            raise file_error(
                pickles[0],
                "is a pickle, which runs code as it is read, and is not loaded; load the model where "
                "you trust it and save it again, which writes model.safetensors",
            )


@contextmanager
def _fitting(folder: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ConfigError(f"{folder}: its weights have other shapes than config.json says") from error


def _check_weights(folder: Path, backbone: Any) -> None:
    """The library fills what is missing with random numbers, and only logs it."""
    from safetensors import safe_open

    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                parts = name.split(".")
                found |= {".".join(parts[start:]) for start in range(len(parts))}
    wanted = [name for name, _ in backbone.named_parameters()]
    # Half, since a model may have parts that none uses, and older files have other names for some.
    if sum(name in found for name in wanted) < len(wanted) / 2:
        raise ConfigError(f"{folder}: its weights are not those of a {type(backbone).__name__}")


def _be_quiet() -> None:
    """Its bars and advice would stand between the log's lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
