"""Activation functions that turn logits into scores."""

import numpy as np

from penstock.core.tensors import Array


def sigmoid(logits: Array) -> Array:
    """Compute the sigmoid without overflow; results near 0 are exact, so that the order of scores is kept."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(logits.dtype, copy=False)


def softmax(logits: Array) -> Array:
    """Compute the softmax of each row without overflow."""
    shares: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares
