"""Predicts how many of a prompt's tokens are in the engine's KV cache, because the engine does not report it.

Computed tokens stay in the cache, block by block, until their memory is needed. A prompt uses the cached blocks that
are equal to its own beginning, and after them a partly filled block. At least one token of a prompt is always computed.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Digests of the token sequences that the engine's cache contains."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._blocks = blocks
        self._size = block_tokens
        self._digests: OrderedDict[int, None] = (
            OrderedDict()
        )  # digests of all tokens up to a block's end, the last used one at the end

    def find(self, ids: Sequence[int]) -> int:
        """Return how many tokens at the start of `ids` are cached."""
        digest, found = 0, 0
        for each in self._block_digests(ids):
            if each not in self._digests:
                break
            self._digests.move_to_end(each)
            digest, found = each, found + self._size
        rest = tuple(ids[found : found + self._size - 1])
        sizes = range(len(rest), 0, -1)
        found += next((size for size in sizes if hash((digest, rest[:size])) in self._digests), 0)
        return min(found, len(ids) - 1)

    def add(self, ids: Sequence[int], is_over: bool = False) -> None:
        """Add computed tokens. A partly filled last block is added only if the generation `is_over`."""
        digests = self._block_digests(ids)
        if is_over and (rest := tuple(ids[len(digests) * self._size :])):
            digests.append(hash((digests[-1] if digests else 0, rest)))
        for digest in digests:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._blocks:
            self._digests.popitem(last=False)

    def _block_digests(self, ids: Sequence[int]) -> list[int]:
        """Return a digest for each whole block, computed over all tokens up to the block's end."""
        digests: list[int] = []
        for end in range(self._size, len(ids) + 1, self._size):
            digests.append(hash((digests[-1] if digests else 0, tuple(ids[end - self._size : end]))))
        return digests
