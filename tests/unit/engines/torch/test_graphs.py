"""Rows of token ids as a CUDA graph takes them; benchmarks/gpu runs capturing and replaying, which need a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from penstock.core.errors import InvalidTensor
from penstock.engines.engine_options import TorchOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.torch.graphs import copy_to_device, fill_padded, unpack
from penstock.engines.torch.torch_engine import TorchEngine


def test_rows_are_placed_into_a_larger_shape() -> None:
    ids = np.array([[5, 6, -1], [7, -1, -1]], np.int32)
    types = np.array([[0, 1, 0], [1, 0, 0]], np.int32)
    target = np.full((2, 4, 5), 99, np.int32)
    fill_padded(target, [ids, types])
    assert target[0].tolist() == [[5, 6, -1, -1, -1], [7, -1, -1, -1, -1], [0, -1, -1, -1, -1], [0, -1, -1, -1, -1]]
    assert target[1].tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0] * 5, [0] * 5]


def test_missing_token_types_become_zeros() -> None:
    target = np.full((2, 2, 3), 99, np.int32)
    fill_padded(target, [np.array([[4, 5]], np.int32)])
    assert target.tolist() == [[[4, 5, -1], [0, -1, -1]], [[0, 0, 0], [0, 0, 0]]]


def test_the_mask_follows_from_the_ids() -> None:
    ids, mask, types = unpack(torch.tensor([[[5, -1]], [[1, 0]]], dtype=torch.int32), 3)
    assert (ids.tolist(), mask.tolist(), types.tolist()) == ([[5, 0]], [[1, 0]], [[1, 0]])
    assert {each.dtype for each in (ids, mask, types)} == {torch.int64}


def test_without_a_graph_the_inputs_are_unchanged() -> None:
    given = copy_to_device([np.array([[5, -1]], np.int32)], 3, torch.device("cpu"))
    assert [each.tolist() for each in given] == [[[5, 0]], [[1, 0]], [[0, 0]]]
    assert len(copy_to_device([np.array([[5, -1]], np.int32)], 2, torch.device("cpu"))) == 2


def test_rows_marked_by_ids_give_the_same_as_masked_rows(tmp_path: Path) -> None:
    """Run on the CPU, which has no graphs; token types count."""
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50, num_labels=2
    )
    torch.manual_seed(3)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    engine = TorchEngine(EngineSpec(tmp_path / "config.json", "auto", 1, 1), TorchOptions())
    engine.load()
    ids = np.array([[5, 6, 7], [8, 9, -1]], np.int32)
    types = np.array([[0, 1, 1], [0, 1, 0]], np.int32)
    masked = {
        "input_ids": np.maximum(ids, 0).astype(np.int64),
        "attention_mask": (ids >= 0).astype(np.int64),
        "token_type_ids": types.astype(np.int64),
    }
    expected = engine.infer(0, masked, [])
    found = engine.infer(0, {"input_ids": ids, "token_type_ids": types}, ["logits"])
    assert np.array_equal(found, expected)
    without = engine.infer(0, {"input_ids": ids}, [])
    assert not np.allclose(without, expected)
    with pytest.raises(InvalidTensor, match="600 tokens in a row"):
        engine.infer(0, {"input_ids": np.zeros((1, 600), np.int32)}, [])
    engine.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_gives_the_same_as_single_kernels(tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50, num_labels=2
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    engine = TorchEngine(EngineSpec(tmp_path / "config.json", "fp32", 1, 2, "cuda"), TorchOptions())
    engine.load()
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 50, shape).astype(np.int32) for shape in ((1, 7), (9, 16), (33, 40), (100, 64))]
    for ids in given:
        ids[::2, -3:] = -1
    expected = [engine.infer(0, {"input_ids": ids}, [])[0] for ids in given]
    engine.prepare_rows(128, 64, None)
    for ids, kernels in [*zip(given, expected, strict=True)] * 2:
        assert np.allclose(engine.infer(1, {"input_ids": ids}, [])[0], kernels, atol=1e-4)
    engine.close()
