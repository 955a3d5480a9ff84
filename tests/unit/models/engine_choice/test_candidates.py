"""The candidate engines and their order, by settings and processor features."""

import pytest

from penstock.models.engine_choice.candidates import EngineCandidate, choose_by_features, find_candidates
from penstock.models.model_yaml import ModelSettings

ORT, FP32_ORT = EngineCandidate("onnx", "auto"), EngineCandidate("onnx", "fp32")
OPENVINO, FP32_OPENVINO, BF16_OPENVINO = (EngineCandidate("openvino", each) for each in ("auto", "fp32", "bf16"))
SAPPHIRE = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
GENOA = {"avx2", "avx512f", "avx512_bf16"}
SKYLAKE = {"avx2", "avx512f"}


@pytest.mark.parametrize(
    ("given", "features", "has_gpu", "expected", "reason"),
    [
        ({}, SAPPHIRE, False, (OPENVINO, ORT), "the processor has BF16 (amx_bf16, avx512_bf16)"),
        ({}, GENOA, False, (OPENVINO, ORT), "the processor has BF16 (avx512_bf16)"),
        ({}, SKYLAKE, False, (ORT, OPENVINO), "the processor has no BF16"),
        (
            {},
            {"asimd", "bf16"},
            False,
            (ORT, OPENVINO),
            "the processor has no BF16",
        ),  # a BF16 feature of another architecture
        ({}, (), False, (ORT, OPENVINO), "the processor has no BF16"),
        ({"precision": "fp32"}, GENOA, False, (FP32_ORT, FP32_OPENVINO), "precision: fp32 is set"),
        ({"precision": "bf16"}, SKYLAKE, False, (BF16_OPENVINO,), "only OpenVINO"),
        ({"file": "model.xml"}, SKYLAKE, False, (OPENVINO,), "only OpenVINO reads .xml"),
        ({"file": "model.ort"}, GENOA, False, (ORT,), "only ONNX Runtime reads .ort"),
        ({"instances": {"device": "cuda:1"}}, GENOA, False, (ORT,), "for a GPU"),
        ({"instances": {"device": "auto"}}, GENOA, True, (ORT,), "for a GPU"),
        ({"instances": {"device": "auto"}}, GENOA, False, (OPENVINO, ORT), "the processor has BF16"),
        ({"instances": {"device": "cpu"}}, GENOA, True, (OPENVINO, ORT), "the processor has BF16"),
    ],
)
def test_candidates_follow_from_features_and_settings(
    given: dict[str, object], features: set[str], has_gpu: bool, expected: tuple[EngineCandidate, ...], reason: str
) -> None:
    settings = ModelSettings.model_validate({"engine": "auto", **given})
    found = find_candidates(settings, features, has_gpu)
    assert found.ordered == expected
    assert reason in found.reason
    for each in expected:  # every candidate's settings are valid
        ModelSettings.model_validate(each.settings(settings).model_dump(exclude_unset=True))


def test_a_named_engine_is_kept() -> None:
    settings = ModelSettings(engine="openvino", precision="fp32")
    assert choose_by_features(settings) == (settings, "")
    assert choose_by_features(ModelSettings(engine="auto")).settings.engine in ("onnx", "openvino")
