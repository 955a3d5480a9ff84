"""Writes a BERT in Hugging Face's form as token-level ONNX in FP32, for optimum: export.py MODEL FOLDER."""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

MAX_LENGTH = 256  # where the other servers truncate; infinity truncates at the config's max_position_embeddings


def export(model: str, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(["two texts", "of different lengths"], padding=True, return_tensors="pt")
    names = ["input_ids", "attention_mask", "token_type_ids"]
    torch.onnx.export(
        AutoModel.from_pretrained(model).eval(),
        tuple(inputs[name] for name in names),
        str(folder / "model.onnx"),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch_size", 1: "sequence_length"} for name in [*names, "last_hidden_state"]},
        opset_version=14,
        dynamo=False,  # optimum's optimizer knows the graphs of this exporter
    )
    tokenizer.save_pretrained(folder)
    AutoConfig.from_pretrained(model, max_position_embeddings=MAX_LENGTH).save_pretrained(folder)


if __name__ == "__main__":
    export(sys.argv[1], Path(sys.argv[2]))
