"""The methods for converting a model to another precision: chooses suitable methods, and performs a conversion."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.engines.onnx import onnx_variants
from penstock.engines.openvino import openvino_variants
from penstock.models.convert.calibration_samples import Samples
from penstock.models.convert.fidelity import Reference
from penstock.models.loading import LoadedModel, ModelFile, load_model
from penstock.models.model_yaml import ModelSettings
from penstock.models.running import BatchArrays, join, prepare_all
from penstock.tasks.built_in import load_description

STATIC_SHARES = (
    0,
    1 / 12,
    1 / 6,
    1 / 3,
)  # of the nodes with weights that stay in floats; the next if accuracy is too low
MARGIN = 0.25  # share of the loss that the floor allows; recipes must be better by it on the calibration samples
MARGIN_DB = 1.0


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    engine: str  # that runs the converted file
    precision: str

    def settings(self, file: str) -> dict[str, Any]:
        """Return the keys of version.yaml with which a worker loads the converted file."""
        found = {"engine": self.engine, "precision": "fp32" if self.engine == "onnx" else "auto", "file": file}
        return {**found, "instances": {"device": "cuda"}} if self.engine == "tensorrt" else found

    @property
    def measuring_engine(self) -> str:
        """Return the engine with which the converted file's accuracy is measured.

        For TensorRT's files this is ONNX Runtime, which gives the same answers without a GPU.
        """
        return "onnx" if self.engine == "tensorrt" else self.engine

    def file_name(self, source: Path) -> str:
        return openvino_variants.FILE if self.engine == "openvino" else source.name


# By precision. The first method of an engine is the engine's default, because it needs no search.
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
CONVERTED = tuple(METHODS)  # precisions that need a converted file


def method_of(engine: str, precision: str) -> Method:
    for method in METHODS.get(precision, ()):
        if method.engine == engine:
            return method
    raise ConfigError(
        f"engine: {engine} has no conversion to {precision}; use onnx, openvino or tensorrt, which have int8 and fp16"
    )


def choose(precision: str, name: str, source: Path, settings: ModelSettings) -> list[Method]:
    """Return the named method, or for `auto` all methods that fit the model; raise ConfigError if no method fits."""
    known = METHODS[precision]
    if name == "auto":
        # The speed of files for TensorRT cannot be measured here, so `auto` leaves them out.
        known = tuple(each for each in known if (each.engine == "tensorrt") == (settings.engine == "tensorrt"))
        fitting = [method for method in known if explain_unsuitable(method, source, settings) is None]
        if precision == "fp16":  # fp16 is chosen for its size, so the engine does not change
            fitting = [method for method in fitting if method.engine == settings.engine] or fitting
        if not fitting:
            raise ConfigError(
                f"{source}: "
                + (explain_unsuitable(known[-1], source, settings) or "no conversion method fits this model")
            )
        return fitting
    method = next((method for method in known if method.name == name), None)
    if method is None:
        names = ", ".join(method.name for method in known)
        raise ConfigError(f"--method {name} does not convert to {precision}; use auto or one of {names}")
    if reason := explain_unsuitable(method, source, settings):
        raise ConfigError(f"--method {name}: {reason}")
    return [method]


def explain_unsuitable(method: Method, source: Path, settings: ModelSettings) -> str | None:
    """Return why a method cannot convert a model on this machine; None if the method can."""
    if method.engine != "openvino" and source.suffix == ".xml":
        return f"{source.name} is OpenVINO's own format, which only --method openvino converts"
    if method.engine == "openvino" and settings.instances.device not in ("auto", "cpu"):
        return f"OpenVINO runs on the CPU, but instances.device is {settings.instances.device}"
    if method.engine == "openvino" and method.precision == "int8" and not openvino_variants.is_available():
        return openvino_variants.ADVICE
    return None


class Converter:
    """Converts one model's file, with whichever method is requested."""

    def __init__(self, original: ModelFile, loaded: LoadedModel, samples: Samples, floor: float) -> None:
        self._original = original
        self._loaded = loaded  # in FP32
        self._samples = samples
        self._floor = floor

    def convert(self, method: Method, folder: Path, report: Callable[[str], None]) -> tuple[ModelFile, dict[str, Any]]:
        """Convert the model into `folder`; return the converted file, and the recipe that was used."""
        source = self._original.file
        target = folder / method.file_name(source)
        recipe: dict[str, Any] = {}
        if method.name == "static" or (method.precision == "int8" and method.engine == "tensorrt"):
            recipe = self._search_recipe(method, target, folder / ".tries", report)
        elif method.precision == "int8" and method.engine == "openvino":
            report("openvino: NNCF quantizes")
            is_text = any(spec.name == "input_ids" for spec in self._loaded.signature.inputs)
            openvino_variants.write_int8(source, target, self._prepare_calibration(), is_text=is_text)
        elif method.engine == "openvino":
            report("openvino: compressing weights")
            openvino_variants.write_fp16(source, target)
        else:
            report(f"{method.name}: converting to {method.precision}")
            onnx_variants.convert(source, target, method.precision)
        return self.model_file(method, target), recipe

    def _prepare_calibration(self) -> list[BatchArrays]:
        """Return the network's inputs for each piece of the calibration samples."""
        return [join(self._loaded, [piece]) for piece in prepare_all(self._loaded, self._samples.calibration_requests)]

    def model_file(self, method: Method, file: Path) -> ModelFile:
        settings = method.settings(file.name)
        changes = {"engine": method.measuring_engine, "precision": settings["precision"], "file": settings["file"]}
        return ModelFile(file, self._original.folder, self._original.settings.model_copy(update=changes))

    def _search_recipe(
        self, method: Method, target: Path, folder: Path, report: Callable[[str], None]
    ) -> dict[str, Any]:
        """Find the most accurate way to quantize: try calibration methods, and sets of nodes that stay unquantized.

        Write the most accurate file, and return its recipe.
        """
        from penstock.engines.onnx.static_quantizer import METHODS as CALIBRATIONS
        from penstock.engines.onnx.static_quantizer import StaticQuantizer

        task, floor = self._original.settings.task, self._floor
        wanted = floor + (MARGIN_DB if load_description(task).comparison.unit == "dB" else MARGIN * (1 - floor))
        rehearsal = Reference(task, self._loaded, self._samples.make_rehearsal())
        folder.mkdir(parents=True)
        is_for_gpu = method.engine == "tensorrt"
        quantizer = StaticQuantizer(self._original.file, self._prepare_calibration(), folder, is_for_gpu=is_for_gpu)
        nodes: list[str] = []
        best: dict[str, Any] = {}
        for share in STATIC_SHARES:
            if share and not nodes:
                report("static: trying each node with weights alone")
                nodes = quantizer.rank_by_sensitivity()
            spared = nodes[: round(share * len(nodes))]
            if best and len(spared) == len(best["in_floats"]):
                continue
            for calibration in [best["calibration"]] if best else CALIBRATIONS:
                report(f"static: {calibration} ranges, {len(spared) or 'no'} nodes left in floats")
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
