"""Two networks as one engine: which of them runs is told by the name of what it is given."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.core.signature import SECOND, Signature
from penstock.core.tensors import Array, TensorSpec
from penstock.engines.base import Engine


class PairedEngine:
    """The second network's tensors have `SECOND` before their names."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self._first = first
        self._second = second

    def load(self) -> Signature:
        signature, other = self._first.load(), self._second.load()
        return replace(
            signature,
            inputs=signature.inputs + _renamed(other.inputs),
            outputs=signature.outputs + _renamed(other.outputs),
        )

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        engine, given = self._choose(inputs)
        engine.warm_up(given)

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Of the second network always all outputs."""
        engine, given = self._choose(inputs)
        return engine.infer(instance, given, outputs if engine is self._first else [])

    def close(self) -> None:
        try:
            self._first.close()
        finally:
            self._second.close()

    def _choose(self, inputs: Mapping[str, Array]) -> tuple[Engine, Mapping[str, Array]]:
        if not any(name.startswith(SECOND) for name in inputs):
            return self._first, inputs
        return self._second, {name.removeprefix(SECOND): array for name, array in inputs.items()}


def _renamed(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, name=SECOND + spec.name) for spec in specs)
