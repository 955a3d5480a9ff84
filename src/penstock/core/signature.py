"""What a model file takes and gives, as its engine read it."""

from dataclasses import dataclass

from penstock.core.tensors import TensorSpec

SECOND = "second."  # before the names of another network's tensors, where a model has two


@dataclass(frozen=True, slots=True)
class TokenRows:
    """How an engine takes rows of token ids from a task of texts; who sends tensors gives it what `inputs` says."""

    length_step: int = 1  # a batch is as long as a multiple of it, or as the longest that the task makes
    # As int32, with PADDING in place of an id where there is none, and so without a mask; types only of pairs. None but
    # such a task gives int32, and it has checked the ids.
    is_marked: bool = False
    vocabulary: int = 0  # every id must be below it; 0: the engine itself looks
    types: int = 0  # every token type likewise


PADDING = -1
GPU_ROWS = TokenRows(length_step=16)  # few shapes, and tiles that its kernels fill


@dataclass(frozen=True, slots=True)
class Signature:
    """A dimension that the file leaves open is -1."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str
    precision: str  # what really runs: fp32, fp16, bf16, int8, …
    device: str = "cpu"  # what `auto` became
    note: str = ""  # how it came to run so, for people: what was chosen, built or found
    token_rows: TokenRows = TokenRows()
    tile: int = 0  # pixels along the side of an image that its device takes at once; 0: as the task's options say
