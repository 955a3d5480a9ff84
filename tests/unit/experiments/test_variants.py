"""Other precisions of a model: their accuracy against FP32, and the repositories that serve them."""

import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from penstock.core.errors import ConfigError
from penstock.core.tensors import BYTES, Tensor, pack_bytes
from penstock.engines.onnx.onnx_variants import convert
from penstock.experiments.variants import Variants
from penstock.models.building import build_engine
from penstock.models.convert.fidelity import answer_all, compare_answers
from penstock.models.folder import read_model_folder
from penstock.models.loading import load_model
from penstock.models.samples.texts import mixed
from penstock.tasks.base import TaskRequest
from tests.measured import make_cases

MODELS = Path(__file__).parents[3] / "models"


@pytest.fixture
def variants(tmp_path: Path) -> Variants:
    return Variants(MODELS, tmp_path / "cache")


@pytest.mark.parametrize(("precision", "least_mean", "size"), [("int8", 0.98, 0.30), ("fp16", 0.9999, 0.55)])
def test_a_converted_minilm_is_close_to_fp32_and_smaller(
    variants: Variants, tmp_path: Path, precision: str, least_mean: float, size: float
) -> None:
    original = variants.original("minilm")
    source = original.file
    convert(source, tmp_path / "other.onnx", precision)
    assert (tmp_path / "other.onnx").stat().st_size < size * source.stat().st_size
    texts = [TaskRequest([Tensor("text", BYTES, (1,), pack_bytes([text]))], []) for text in mixed(32, 3)]
    with load_model(original) as one, load_model(replace(original, file=tmp_path / "other.onnx")) as other:
        found = compare_answers("embed", answer_all(one, [texts]), answer_all(other, [texts]))
    assert found.samples == 32
    assert found.value >= least_mean
    assert found.details["cosine"]["min"] >= least_mean - 0.02
    assert found.details["cosine"]["min"] < 1.0  # another file


def test_a_repository_has_the_case_and_links_its_files(variants: Variants, tmp_path: Path) -> None:
    (case,) = make_cases(
        model={"name": "srcnn", "instances": 2, "precision": "fp16"},
        batching={"max_rows": 3},
        experiment={"concurrency_levels": [1]},
    )
    folder = read_model_folder(variants.build_repository(case, tmp_path / "models") / "srcnn")
    settings = folder.settings
    assert (settings.task, settings.engine, settings.precision) == ("upscale", "onnx", "fp32")
    assert (settings.batching.max_rows, settings.batching.max_tokens) == (3, 1)  # the second is the model's own
    assert (settings.instances.count, settings.instances.threads) == (2, 1)
    file = folder.file("1")
    assert file.resolve().parents[1] == tmp_path / "cache"
    half = {tensor.data_type for tensor in onnx.load(file).graph.initializer}
    assert onnx.TensorProto.FLOAT16 in half


def test_a_conversion_is_made_once_per_content(variants: Variants, tmp_path: Path) -> None:
    (case,) = make_cases(model={"name": "srcnn", "precision": "fp16"}, experiment={"concurrency_levels": [1]})
    variants.build_repository(case, tmp_path / "one")
    (made,) = (tmp_path / "cache").glob("*/*.onnx")
    before = made.stat().st_ino
    variants.build_repository(case, tmp_path / "two")
    assert [file.stat().st_ino for file in (tmp_path / "cache").glob("*/*.onnx")] == [before]


def test_int8_on_openvino_uses_openvinos_own_conversion(variants: Variants, tmp_path: Path) -> None:
    (case,) = make_cases(
        model={"name": "srcnn", "precision": "int8", "engine": "openvino"}, experiment={"concurrency_levels": [1]}
    )
    folder = read_model_folder(variants.build_repository(case, tmp_path / "models") / "srcnn")
    assert (folder.settings.engine, folder.settings.file) == ("openvino", "model.xml")
    names = sorted(file.name for file in (folder.path / "1").iterdir())
    assert names == ["denoise.onnx", "model.bin", "model.xml"]
    engine = build_engine(folder.file("1"), folder.settings, 1)
    assert engine.load().precision == "int8"
    engine.close()


def test_cases_are_made_from_the_original_if_the_newest_version_was_converted(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "srcnn", tmp_path / "srcnn")
    shutil.copytree(MODELS / "srcnn" / "1", tmp_path / "srcnn" / "2")
    variants = Variants(tmp_path, tmp_path / "cache")
    assert variants.file("srcnn") == tmp_path / "srcnn" / "2" / "model.onnx"
    (tmp_path / "srcnn" / "2" / "quantization.json").write_text('{"of_version": "1"}')
    assert variants.file("srcnn") == tmp_path / "srcnn" / "1" / "model.onnx"
    (tmp_path / "srcnn" / "2" / "quantization.json").write_text('{"of_version": "9"}')  # deleted
    assert variants.file("srcnn") == tmp_path / "srcnn" / "2" / "model.onnx"


def test_an_invalid_model_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("not a model")
    with pytest.raises(ConfigError, match="is not an ONNX file"):
        convert(tmp_path / "model.onnx", tmp_path / "out" / "other.onnx", "int8")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"backend": "pytorch"}, "the torch engine reads TorchScript and torch.export files and transformers folders"),
        ({"engine": "openvino", "device": "cuda"}, "runs on the CPU, not on cuda"),
        ({"engine": "onnx", "precision": "bf16"}, "precision bf16 needs engine: openvino"),
    ],
)
def test_unsupported_cases_have_a_reason(variants: Variants, model: dict[str, str], reason: str) -> None:
    (case,) = make_cases(model=model, experiment={"concurrency_levels": [1]})
    assert reason in (variants.why_not(case) or "")


def test_supported_cases_have_no_reason(variants: Variants) -> None:
    for case in make_cases(matrix={"precision": ["fp32", "int8", "fp16"], "model": ["minilm", "srcnn", "identity"]}):
        assert variants.why_not(case) is None


def test_data_and_engine_follow_from_the_model(variants: Variants) -> None:
    assert [variants.data_of(name) for name in ("minilm", "srcnn", "identity")] == ["pairs", "photos", "noop"]
    assert variants.engine_of("minilm") in ("openvino", "onnx")  # depends on the processor
    assert variants.engine_of("identity") == "onnx"
    with pytest.raises(ConfigError, match="no such model"):
        variants.engine_of("nowhere")
