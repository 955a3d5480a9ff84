"""The embed task: texts become token ids, token ids become vectors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, from_array
from penstock.tasks.base import Prepared, TaskRequest
from penstock.tasks.network import find_output
from penstock.tasks.options import EmbedOptions
from penstock.tasks.text import TextNetwork, TextTask

OUTPUT = "embedding"


class EmbedTask(TextTask):
    def __init__(
        self,
        folder: Path,
        options: EmbedOptions,
        max_rows: int,
        engine: Signature,
        max_tokens_per_request: int,
    ) -> None:
        network = TextNetwork("embed", folder, options, engine, max_tokens_per_request)
        width = find_output(engine, options.output, "embed.output", ("FP32",)).shape[1]
        super().__init__(network, options.output, TensorSpec(OUTPUT, "FP32", (-1, width)), max_rows)

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        return [from_array(OUTPUT, np.concatenate([result[0] for result in results]))]
