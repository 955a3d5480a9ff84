"""From a model's settings to its engine. Each imports its runtime only when a model asks for it."""

from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.core.plugins import ENGINES, load_plugin
from penstock.engines.base import Engine, EngineSpec
from penstock.models.settings import ModelSettings


def build_engine(file: Path, settings: ModelSettings, instances: int) -> Engine:
    """`instances` are the processor's: on a GPU all of them share one session, however many they are."""
    asked = settings.instances
    spec = EngineSpec(file, settings.precision, asked.threads, instances, asked.device)
    factory = _ENGINES.get(settings.engine) or load_plugin(ENGINES, settings.engine)
    engine: Engine = factory(spec, settings)
    return engine


def _onnx(spec: EngineSpec, settings: ModelSettings) -> Engine:
    from penstock.engines.onnx.engine import OnnxEngine

    return OnnxEngine(spec)


def _openvino(spec: EngineSpec, settings: ModelSettings) -> Engine:
    from penstock.engines.openvino.engine import OpenVinoEngine

    return OpenVinoEngine(spec)


def _torch(spec: EngineSpec, settings: ModelSettings) -> Engine:
    from penstock.engines.torch.engine import TorchEngine

    return TorchEngine(spec, settings.torch)


def _python(spec: EngineSpec, settings: ModelSettings) -> Engine:
    from penstock.engines.python.engine import PythonEngine

    timeouts = settings.timeouts
    return PythonEngine(spec, settings.python, hang_s=timeouts.request_s, load_s=timeouts.load_s)


_ENGINES: Mapping[str, Callable[[EngineSpec, ModelSettings], Engine]] = {
    "onnx": _onnx,
    "openvino": _openvino,
    "torch": _torch,
    "python": _python,
}
