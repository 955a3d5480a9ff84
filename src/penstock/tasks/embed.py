"""The embed task: texts become token ids, token ids become vectors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, from_array
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature
from penstock.tasks.columns import check_outputs
from penstock.tasks.network import find_output
from penstock.tasks.options import EmbedOptions
from penstock.tasks.text import TextInput, TextNetwork

OUTPUT = "embedding"


class EmbedTask:
    is_prepare_cheap = False
    is_finish_cheap = True

    def __init__(
        self,
        folder: Path,
        options: EmbedOptions,
        max_rows: int,
        engine: Signature,
        max_tokens_per_request: int,
    ) -> None:
        tokenizer = folder / options.tokenizer
        network = TextNetwork("embed", engine, tokenizer, options.max_length, max_tokens_per_request)
        width = find_output(engine, options.output, "embed.output", ("FP32",)).shape[1]
        self._input = TextInput(network, max_rows)
        self.engine_outputs: Sequence[str] = (options.output,)
        self.signature = TaskSignature(self._input.specs, (TensorSpec(OUTPUT, "FP32", (-1, width)),), max_rows)

    def prepare(self, request: TaskRequest) -> Prepared:
        check_outputs(request, (OUTPUT,))
        return self._input.prepare(request)

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        return self._input.join(pieces)

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        vectors = outputs[0]
        return [(vectors[row : row + 1],) for row in range(len(pieces))]

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        return [from_array(OUTPUT, np.concatenate([result[0] for result in results]))]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        return self._input.warm_up_inputs()
