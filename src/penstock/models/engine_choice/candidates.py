"""The engines that `engine: auto` may become, the one first that the processor's features speak for."""

from collections.abc import Collection
from pathlib import PurePath
from typing import NamedTuple

from penstock.models.settings import AUTO, ModelSettings
from penstock.telemetry.machine import processor_features

BF16_FEATURES = ("amx_bf16", "avx512_bf16")


class EngineCandidate(NamedTuple):
    engine: str
    precision: str  # as model.yaml would say it

    def settings(self, settings: ModelSettings) -> ModelSettings:
        return settings.model_copy(update=self._asdict())


class EngineCandidates(NamedTuple):
    ordered: tuple[EngineCandidate, ...]  # at least one; the first is taken where nothing is tried
    reason: str  # why it is the first


class TrialVerdict(NamedTuple):
    chosen: EngineCandidate
    reason: str
    is_tried: bool = True  # False: the machine was too busy, which it may not be next time


class EngineChoice(NamedTuple):
    settings: ModelSettings  # with an engine that can be loaded
    note: str = ""  # what was chosen and why, for people; empty: nothing was left to choose


def choice_of(verdict: TrialVerdict, settings: ModelSettings) -> EngineChoice:
    """`settings` say `engine: auto`."""
    return EngineChoice(verdict.chosen.settings(settings), f"engine auto is {verdict.chosen.engine}: {verdict.reason}")


def find_candidates(settings: ModelSettings, features: Collection[str], has_gpu: bool = False) -> EngineCandidates:
    """`has_gpu`: whether ONNX Runtime would take one that `instances.device: auto` leaves to it."""
    asked, suffix, device = settings.precision, PurePath(settings.file).suffix, settings.instances.device
    onnx, openvino = EngineCandidate("onnx", "auto" if asked == "auto" else "fp32"), EngineCandidate("openvino", asked)
    if suffix == ".xml":
        return EngineCandidates((openvino,), "only OpenVINO reads .xml")
    if suffix == ".ort":
        return EngineCandidates((onnx,), "only ONNX Runtime reads .ort")
    if device not in ("auto", "cpu") or (device == "auto" and has_gpu):
        return EngineCandidates((onnx,), "OpenVINO serves on the CPU, and this model is for a GPU")
    if asked == "bf16":
        return EngineCandidates((openvino,), "only OpenVINO computes in BF16 on a CPU")
    found = [feature for feature in BF16_FEATURES if feature in features]
    if asked == "auto" and found:
        return EngineCandidates(
            (openvino, onnx), f"the processor has BF16 ({', '.join(found)}), which OpenVINO computes in"
        )
    why = "FP32 is asked for" if asked == "fp32" else "the processor has no BF16"
    return EngineCandidates((onnx, openvino), f"{why}, and in FP32 ONNX Runtime is rarely the slower one")


def choose_by_features(settings: ModelSettings) -> EngineChoice:
    """Without a trial. Settings that name their engine stay as they are."""
    if settings.engine != AUTO:
        return EngineChoice(settings)
    found = find_candidates(settings, processor_features(), takes_gpu(settings))
    return choice_of(TrialVerdict(found.ordered[0], found.reason), settings)


def takes_gpu(settings: ModelSettings) -> bool:
    """Whether ONNX Runtime would run the model on a GPU where it may choose; asks only then, which takes a while."""
    if settings.instances.device != "auto":
        return False
    from penstock.engines.availability import why_not

    return why_not("onnx", "cuda", "auto") is None or why_not("onnx", "mps", "auto") is None
