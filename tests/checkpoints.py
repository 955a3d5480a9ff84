"""Small models with random weights, saved as transformers saves them, and transformers' own outputs for texts."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.tensors import Array
from penstock.engines.onnx.bert_file import find_minilm_weights


def save_classifier(folder: Path, labels: Sequence[str], seed: int = 7, **config: Any) -> Path:
    """Save a BertForSequenceClassification of two layers with the tokenizer of all-MiniLM-L6-v2."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    settings = BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.5,  # far from 0, otherwise every text would have the same answer
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        **config,
    )
    BertForSequenceClassification(settings).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(find_minilm_weights() / name, folder / name)
    return folder


def compute_reference_logits(folder: Path, *texts: Sequence[str], max_length: int = 512) -> Array:
    """Return transformers' own logits of texts or pairs of texts, each computed alone."""
    import torch
    from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

    model = BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.backend_tokenizer.no_padding()
    rows = []
    for text in zip(*texts, strict=True):
        truncation = "only_second" if len(text) == 2 else True
        # As lists: alone, an empty second text would count as none.
        encoded = tokenizer(
            *([part] for part in text),
            truncation=truncation,
            max_length=max_length,
            return_token_type_ids=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            rows.append(model(**encoded).logits.numpy())
    return np.concatenate(rows)
