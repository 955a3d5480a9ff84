"""The embed task: turns texts into vectors."""

from pathlib import Path

from penstock.core.signature import Signature
from penstock.core.tensors import TensorSpec
from penstock.tasks.network import find_output
from penstock.tasks.options import EmbedOptions, TextLimits
from penstock.tasks.text import TextNetwork, TextTask

OUTPUT = "embedding"


class EmbedTask(TextTask):
    def __init__(
        self,
        folder: Path,
        options: EmbedOptions,
        engine: Signature,
        limits: TextLimits,
    ) -> None:
        network = TextNetwork("embed", folder, options, engine, limits)
        width = find_output(engine, options.output, "embed.output", ("FP32",)).shape[1]
        super().__init__(network, options.output, TensorSpec(OUTPUT, "FP32", (-1, width)))
