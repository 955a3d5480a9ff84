"""An engine of two networks; the names of a batch's inputs decide which network runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.core.signature import SECOND_PREFIX, Signature
from penstock.core.tensors import Array, TensorSpec
from penstock.engines.engine_protocols import Engine


class TwoNetworkEngine:
    """Runs two networks as one engine. The second network's tensor names begin with `SECOND_PREFIX`."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self._first = first
        self._second = second

    def load(self) -> Signature:
        signature, other = self._first.load(), self._second.load()
        return replace(
            signature,
            inputs=signature.inputs + _add_prefix(other.inputs),
            outputs=signature.outputs + _add_prefix(other.outputs),
        )

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        engine, given = self._choose_network(inputs)
        engine.warm_up(given)

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run the network that the input names select. The second network always returns all its outputs."""
        engine, given = self._choose_network(inputs)
        return engine.infer(instance, given, outputs if engine is self._first else [])

    def close(self) -> None:
        try:
            self._first.close()
        finally:
            self._second.close()

    def _choose_network(self, inputs: Mapping[str, Array]) -> tuple[Engine, Mapping[str, Array]]:
        if not any(name.startswith(SECOND_PREFIX) for name in inputs):
            return self._first, inputs
        return self._second, {name.removeprefix(SECOND_PREFIX): array for name, array in inputs.items()}


def _add_prefix(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, name=SECOND_PREFIX + spec.name) for spec in specs)
