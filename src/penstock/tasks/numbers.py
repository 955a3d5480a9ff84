"""What turns a network's raw numbers into scores."""

import numpy as np

from penstock.core.tensors import Array


def sigmoid(logits: Array) -> Array:
    """Sigmoid without overflow, and exact for scores near 0, whose order matters."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(logits.dtype, copy=False)


def softmax(logits: Array) -> Array:
    """Softmax over each row, without overflow."""
    shares: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares
