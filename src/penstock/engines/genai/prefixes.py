"""How much of a prompt the engine finds in its cache: it does not tell, but it goes by rules that can be followed.

What was computed stays in the cache, block by block, until its place is needed. A prompt finds the blocks that begin
as it does, and one that was never filled if it goes on where that ends. At least one token is computed.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._blocks = blocks
        self._size = block_tokens
        self._known: OrderedDict[int, None] = OrderedDict()  # digests of what is up to a block's end, the newest last

    def find(self, ids: Sequence[int]) -> int:
        """How many of these tokens need not be computed."""
        digest, found = 0, 0
        for each in self._whole(ids):
            if each not in self._known:
                break
            self._known.move_to_end(each)
            digest, found = each, found + self._size
        rest = tuple(ids[found : found + self._size - 1])
        sizes = range(len(rest), 0, -1)
        found += next((size for size in sizes if hash((digest, rest[:size])) in self._known), 0)
        return min(found, len(ids) - 1)

    def add(self, ids: Sequence[int], is_over: bool = False) -> None:
        """These are computed. The last block may still grow unless it is over, and cannot be found until then."""
        digests = self._whole(ids)
        if is_over and (rest := tuple(ids[len(digests) * self._size :])):
            digests.append(hash((digests[-1] if digests else 0, rest)))
        for digest in digests:
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > self._blocks:
            self._known.popitem(last=False)

    def _whole(self, ids: Sequence[int]) -> list[int]:
        """The digest of what is up to the end of each whole block."""
        digests: list[int] = []
        for end in range(self._size, len(ids) + 1, self._size):
            digests.append(hash((digests[-1] if digests else 0, tuple(ids[end - self._size : end]))))
        return digests
