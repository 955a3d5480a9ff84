"""The ways to convert a model, which of them fit it, and the file that each makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.engines.onnx import variants as onnx_variants
from penstock.engines.openvino import variants as openvino_variants
from penstock.models.convert.fidelity import Reference, rule_of
from penstock.models.convert.samples import Samples
from penstock.models.loading import LoadedModel, ModelFile, load_model
from penstock.models.running import BatchArrays, prepare_all
from penstock.models.settings import ModelSettings

STATIC_SHARES = (0, 1 / 12, 1 / 6, 1 / 3)  # of the nodes with weights, that are left in floats while too much is lost
MARGIN = 0.25  # of what the floor lets go, that a recipe must keep on what it has learnt from
MARGIN_DB = 1.0


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    engine: str  # that runs what it makes
    precision: str

    def settings(self, file: str) -> dict[str, Any]:
        """For version.yaml. A converted file has its precision in it; OpenVINO chooses for the rest of the network."""
        found = {"engine": self.engine, "precision": "fp32" if self.engine == "onnx" else "auto", "file": file}
        return {**found, "instances": {"device": "cuda"}} if self.engine == "tensorrt" else found

    @property
    def tried_on(self) -> str:
        """The engine that it is measured with: what is for TensorRT needs no GPU here, and answers alike."""
        return "onnx" if self.engine == "tensorrt" else self.engine

    def file_name(self, source: Path) -> str:
        return openvino_variants.FILE if self.engine == "openvino" else source.name


# By precision; the first of an engine stands for it where nobody chooses: it needs no search.
METHODS: Mapping[str, tuple[Method, ...]] = {
    "int8": (
        Method("dynamic", "onnx", "int8"),
        Method("static", "onnx", "int8"),
        Method("openvino", "openvino", "int8"),
        Method("tensorrt", "tensorrt", "int8"),
    ),
    "fp16": (
        Method("onnx", "onnx", "fp16"),
        Method("openvino", "openvino", "fp16"),
        Method("tensorrt", "tensorrt", "fp16"),
    ),
}
CONVERTED = tuple(METHODS)  # precisions that need a file of their own


def method_of(engine: str, precision: str) -> Method:
    for method in METHODS.get(precision, ()):
        if method.engine == engine:
            return method
    raise ConfigError(
        f"there is no {precision} for engine: {engine}; int8 and fp16 are made for onnx, openvino and tensorrt"
    )


def choose(precision: str, name: str, source: Path, settings: ModelSettings) -> list[Method]:
    """`auto`: all that fit the model; raises ConfigError where the one asked for does not."""
    known = METHODS[precision]
    if name == "auto":
        # What is for TensorRT is measured elsewhere, so it cannot be chosen among others by its speed.
        known = tuple(each for each in known if (each.engine == "tensorrt") == (settings.engine == "tensorrt"))
        fitting = [method for method in known if why_not(method, source, settings) is None]
        if precision == "fp16":  # a matter of size: the engine stays
            fitting = [method for method in fitting if method.engine == settings.engine] or fitting
        if not fitting:
            raise ConfigError(f"{source}: " + (why_not(known[-1], source, settings) or "nothing fits it"))
        return fitting
    method = next((method for method in known if method.name == name), None)
    if method is None:
        names = ", ".join(method.name for method in known)
        raise ConfigError(f"--method {name} does not make {precision}; what does: auto, {names}")
    if reason := why_not(method, source, settings):
        raise ConfigError(f"--method {name}: {reason}")
    return [method]


def why_not(method: Method, source: Path, settings: ModelSettings) -> str | None:
    """Why a method does not fit a model here; None where it does."""
    if method.engine != "openvino" and source.suffix == ".xml":
        return f"{source.name} is OpenVINO's own format, which only --method openvino converts"
    if method.engine == "openvino" and settings.instances.device not in ("auto", "cpu"):
        return f"OpenVINO serves on the CPU, and instances.device is {settings.instances.device}"
    if method.engine == "openvino" and method.precision == "int8" and not openvino_variants.is_available():
        return openvino_variants.ADVICE
    return None


class Converter:
    """Makes one model's other files."""

    def __init__(self, original: ModelFile, loaded: LoadedModel, samples: Samples, floor: float) -> None:
        self._original = original
        self._loaded = loaded  # in FP32
        self._samples = samples
        self._floor = floor

    def convert(self, method: Method, folder: Path, tell: Callable[[str], None]) -> tuple[ModelFile, dict[str, Any]]:
        """The file in `folder`, and how it was made."""
        source = self._original.file
        target = folder / method.file_name(source)
        recipe: dict[str, Any] = {}
        if method.name == "static" or (method.precision == "int8" and method.engine == "tensorrt"):
            recipe = self._search(method, target, folder / ".tries", tell)
        elif method.precision == "int8" and method.engine == "openvino":
            tell("openvino: NNCF quantizes")
            is_text = any(spec.name == "input_ids" for spec in self._loaded.signature.inputs)
            openvino_variants.write_int8(source, target, self._learnt_arrays(), is_text=is_text)
        elif method.engine == "openvino":
            tell("openvino: compressing weights")
            openvino_variants.write_fp16(source, target)
        else:
            tell(f"{method.name}: converting to {method.precision}")
            onnx_variants.convert(source, target, method.precision)
        return self.model_file(method, target), recipe

    def _learnt_arrays(self) -> list[BatchArrays]:
        """What the network gets for each piece of the samples to learn from."""
        return [self._loaded.task.join([piece]) for piece in prepare_all(self._loaded, self._samples.learnt)]

    def model_file(self, method: Method, file: Path) -> ModelFile:
        said = method.settings(file.name)
        changes = {"engine": method.tried_on, "precision": said["precision"], "file": said["file"]}
        return ModelFile(file, self._original.folder, self._original.settings.model_copy(update=changes))

    def _search(self, method: Method, target: Path, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
        """The calibration and the nodes to spare, chosen by what is left of the accuracy."""
        from penstock.engines.onnx.static import METHODS as CALIBRATIONS
        from penstock.engines.onnx.static import StaticQuantizer

        task, floor = self._original.settings.task, self._floor
        wanted = floor + (MARGIN_DB if rule_of(task).unit == "dB" else MARGIN * (1 - floor))
        rehearsal = Reference(task, self._loaded, self._samples.rehearsal())
        folder.mkdir(parents=True)
        is_for_gpu = method.engine == "tensorrt"
        quantizer = StaticQuantizer(self._original.file, self._learnt_arrays(), folder, is_for_gpu=is_for_gpu)
        nodes: list[str] = []
        best: dict[str, Any] = {}
        for share in STATIC_SHARES:
            if share and not nodes:
                tell("static: trying each node with weights alone")
                nodes = quantizer.most_sensitive()
            spared = nodes[: round(share * len(nodes))]
            if best and len(spared) == len(best["in_floats"]):
                continue
            for calibration in [best["calibration"]] if best else CALIBRATIONS:
                tell(f"static: {calibration} ranges, {len(spared) or 'no'} nodes left in floats")
                file = folder / f"{len(spared)}-{calibration}" / target.name
                quantizer.write(file, calibration, spared)
                with load_model(self.model_file(method, file)) as found:
                    value = rehearsal.compare(found).value
                if not best or value > best["learnt"]:
                    best = {"calibration": calibration, "in_floats": spared, "learnt": value, "folder": file.parent}
            if best["learnt"] >= wanted:
                break
        for made in best.pop("folder").iterdir():
            made.rename(target.parent / made.name)
        return best
