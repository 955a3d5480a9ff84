"""Two networks as one engine."""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.core.signature import Signature
from penstock.core.tensors import Array, TensorSpec
from penstock.engines.two_networks import TwoNetworkEngine

X = np.ones(3, np.float32)


class Times:
    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.warm: list[float] = []
        self.is_closed = False

    def load(self) -> Signature:
        x, y = (TensorSpec(name, "FP32", (-1,)) for name in ("x", "y"))
        return Signature((x,), (y,), "times", "fp32", tile=self.factor)

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        self.warm.append(float(inputs["x"].sum()))

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        assert list(outputs) in ([], ["y"])
        return [inputs["x"] * self.factor + instance]

    def close(self) -> None:
        self.is_closed = True


def test_the_name_of_the_input_selects_the_network() -> None:
    first, second = Times(2), Times(3)
    engine = TwoNetworkEngine(first, second)
    signature = engine.load()
    assert [spec.name for spec in signature.inputs] == ["x", "second.x"]
    assert [spec.name for spec in signature.outputs] == ["y", "second.y"]
    assert signature.tile == 2
    assert engine.infer(1, {"x": X}, ["y"])[0].tolist() == [3, 3, 3]
    assert engine.infer(1, {"second.x": X}, ["y"])[0].tolist() == [4, 4, 4]
    engine.warm_up({"second.x": X})
    assert (first.warm, second.warm) == ([], [3.0])
    engine.close()
    assert first.is_closed
    assert second.is_closed
