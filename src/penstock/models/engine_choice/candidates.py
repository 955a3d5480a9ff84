"""Finds the candidates for `engine: auto`, and orders them by the processor's features."""

from collections.abc import Collection
from pathlib import PurePath
from typing import NamedTuple

from penstock.models.model_yaml import AUTO, ModelSettings
from penstock.telemetry.machine import read_processor_features

BF16_FEATURES = ("amx_bf16", "avx512_bf16")


class EngineCandidate(NamedTuple):
    engine: str
    precision: str  # as in model.yaml

    def settings(self, settings: ModelSettings) -> ModelSettings:
        return settings.model_copy(update=self._asdict())


class EngineCandidates(NamedTuple):
    ordered: tuple[EngineCandidate, ...]  # at least one; without a trial, the first is chosen
    reason: str  # why the first candidate is preferred


class TrialVerdict(NamedTuple):
    chosen: EngineCandidate
    reason: str
    is_tried: bool = True  # False: the machine was too busy for a trial


class EngineChoice(NamedTuple):
    settings: ModelSettings  # with a concrete engine
    note: str = ""  # the choice and its reason; empty if there was only one candidate


def make_choice(verdict: TrialVerdict, settings: ModelSettings) -> EngineChoice:
    """Return the settings with the chosen engine, and a note with the reason for the choice."""
    return EngineChoice(verdict.chosen.settings(settings), f"engine auto is {verdict.chosen.engine}: {verdict.reason}")


def find_candidates(settings: ModelSettings, features: Collection[str], has_gpu: bool = False) -> EngineCandidates:
    """Return the candidate engines. `has_gpu`: ONNX Runtime would use a GPU for `instances.device: auto`."""
    asked, suffix, device = settings.precision, PurePath(settings.file).suffix, settings.instances.device
    onnx, openvino = EngineCandidate("onnx", "auto" if asked == "auto" else "fp32"), EngineCandidate("openvino", asked)
    if suffix == ".xml":
        return EngineCandidates((openvino,), "only OpenVINO reads .xml")
    if suffix == ".ort":
        return EngineCandidates((onnx,), "only ONNX Runtime reads .ort")
    if device not in ("auto", "cpu") or (device == "auto" and has_gpu):
        return EngineCandidates((onnx,), "OpenVINO runs on the CPU, but this model is for a GPU")
    if asked == "bf16":
        return EngineCandidates((openvino,), "only OpenVINO computes in BF16 on a CPU")
    found = [feature for feature in BF16_FEATURES if feature in features]
    if asked == "auto" and found:
        return EngineCandidates((openvino, onnx), f"the processor has BF16 ({', '.join(found)}), which OpenVINO uses")
    why = "precision: fp32 is set" if asked == "fp32" else "the processor has no BF16"
    return EngineCandidates((onnx, openvino), f"{why}, and ONNX Runtime is rarely slower in FP32")


def choose_by_features(settings: ModelSettings) -> EngineChoice:
    """Choose the engine without a trial. If the settings name an engine, choose this engine."""
    if settings.engine != AUTO:
        return EngineChoice(settings)
    found = find_candidates(settings, read_processor_features(), would_use_gpu(settings))
    return make_choice(TrialVerdict(found.ordered[0], found.reason), settings)


def would_use_gpu(settings: ModelSettings) -> bool:
    """Return whether `instances.device` is `auto` and ONNX Runtime would run the model on a GPU."""
    if settings.instances.device != "auto":
        return False
    from penstock.engines.availability import explain_unsupported

    return explain_unsupported("onnx", "cuda", "auto") is None or explain_unsupported("onnx", "mps", "auto") is None
