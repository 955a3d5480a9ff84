"""Quantization of small models: published versions, refusals and samples."""

import json
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from onnx import helper
from typer.testing import CliRunner

from penstock.cli import main as cli
from penstock.core.errors import ConfigError, UnknownModel
from penstock.engines.engine_options import TensorRtOptions
from penstock.engines.tensorrt.engine_build import build_engine_file, plan_engine
from penstock.engines.tensorrt.library import find_library
from penstock.engines.tensorrt.shapes import ShapeLimits
from penstock.models.convert.calibration_samples import MIN_SAMPLES, collect_samples
from penstock.models.convert.fidelity import Reference
from penstock.models.convert.publish import create_staging_folder, publish, read_report
from penstock.models.convert.quantize import publish_variant, quantize
from penstock.models.convert.report import QuantizationOptions
from penstock.models.folder import ModelFolder, read_model_folder
from penstock.models.loading import ModelFile, load_model
from tests.servers import write_identity, write_model
from tests.small_models import WIDTH, dense_graph, write_dense

run = CliRunner().invoke


@pytest.fixture
def dense(tmp_path: Path) -> ModelFolder:
    write_dense(tmp_path)
    (tmp_path / "dense" / "1" / "labels.txt").write_text("a\nb\n")
    return read_model_folder(tmp_path / "dense")


def make_inputs(count: int = 24) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((count, WIDTH)).astype(np.float32)


def write_inputs(tmp_path: Path, count: int = 24) -> Path:
    np.savez(tmp_path / "inputs.npz", x=make_inputs(count))
    return tmp_path / "inputs.npz"


def outputs(file: Path, inputs: np.ndarray) -> np.ndarray:
    """Return the outputs of ONNX Runtime, computed row by row."""
    if file.suffix == ".xml":
        import openvino

        compiled = openvino.Core().compile_model(str(file), "CPU")
        return np.concatenate([np.array(compiled({"x": row[None]})[0]) for row in inputs])
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {"x": row[None]})[0] for row in inputs])


@pytest.mark.parametrize(
    ("precision", "method", "file", "operation"),
    [
        ("int8", "dynamic", "model.onnx", "DynamicQuantizeLinear"),
        ("int8", "static", "model.onnx", "QuantizeLinear"),
        ("int8", "openvino", "model.xml", "FakeQuantize"),
        ("fp16", "auto", "model.onnx", "Cast"),
        ("fp16", "openvino", "model.xml", ""),
        ("int8", "tensorrt", "model.onnx", "QuantizeLinear"),
        ("fp16", "tensorrt", "model.onnx", "Cast"),
    ],
)
def test_a_quantized_variant_is_published_with_its_report(
    dense: ModelFolder, tmp_path: Path, precision: str, method: str, file: str, operation: str
) -> None:
    given = write_inputs(tmp_path)
    outcome = quantize(
        dense, QuantizationOptions(precision=precision, method=method, calibration=given, min_accuracy=0.9)
    )
    assert outcome.version == "2"
    folder = dense.path / "2"
    report = json.loads((folder / "quantization.json").read_text())
    assert report == outcome.report
    assert (folder / "labels.txt").read_text() == "a\nb\n"
    assert sorted(entry.name for entry in dense.path.iterdir()) == ["1", "2", "model.yaml"]
    settings = yaml.safe_load((folder / "version.yaml").read_text())
    assert settings["file"] == file
    assert settings["engine"] == ("openvino" if file == "model.xml" else "tensorrt" if method == "tensorrt" else "onnx")

    if method == "tensorrt" and find_spec("tensorrt_rtx_bindings"):  # the package is not installed on every machine
        assert settings["instances"] == {"device": "cuda"}
        plan = plan_engine(folder / file, ShapeLimits(rows=4), TensorRtOptions(), find_library("auto"))
        assert (plan.precision, len(build_engine_file(plan)) > 1000) == (precision, True)

    data = make_inputs()[::2]  # the held-out samples
    expected, found = outputs(dense.file("1"), data), outputs(folder / file, data)
    cosine = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(expected, found, strict=True)]
    accuracy = report["accuracy"]
    assert accuracy["samples"] == len(cosine) == 12
    tolerance = 1e-3 if precision == "int8" else 1e-4  # OpenVINO chooses the precision of other nodes
    assert accuracy["value"] == pytest.approx(np.mean(cosine), abs=tolerance)
    assert accuracy["details"]["cosine"]["min"] == pytest.approx(min(cosine), abs=5 * tolerance)
    relative = np.abs(expected - found).max(axis=1) / np.abs(expected).max(axis=1)
    assert accuracy["details"]["relative_error_max"] == pytest.approx(relative.max(), abs=0.02)
    assert report["samples"] == {
        "source": str(given),
        "unit": "samples",
        "calibration": 12,
        "held_out": 12,
        "are_random": False,
    }
    made = sum((folder / name).stat().st_size for name in (file, "model.bin") if (folder / name).is_file())
    assert report["size"]["bytes"] == made
    assert report["original"]["size_bytes"] == dense.file("1").stat().st_size
    assert report["speed"]["rounds"] == 5
    assert report["speed"]["over_original"] > 0
    assert operation in (folder / file).read_bytes().decode("latin-1")


def test_a_variant_below_the_floor_is_refused_unless_forced(dense: ModelFolder) -> None:
    order = QuantizationOptions(method="dynamic", min_accuracy=0.999999)
    outcome = quantize(dense, order)
    assert not outcome.version
    assert "below 0.999999" in outcome.refusal
    assert "--method static" in outcome.refusal
    assert "--force" in outcome.refusal
    assert sorted(entry.name for entry in dense.path.iterdir()) == ["1", "model.yaml"]
    forced = quantize(dense, QuantizationOptions(method="dynamic", min_accuracy=0.999999, is_forced=True))
    assert forced.version == "2"
    assert forced.report["is_forced"] is True
    assert forced.report["accuracy"]["is_met"] is False
    assert forced.report["samples"]["are_random"] is True


def test_auto_publishes_the_accurate_variant_with_the_most_certain_gain(dense: ModelFolder, tmp_path: Path) -> None:
    outcome = quantize(dense, QuantizationOptions(calibration=write_inputs(tmp_path), min_accuracy=0.99))
    rows = {row["method"]: row for row in outcome.report["candidates"]}
    assert set(rows) == {"dynamic", "static", "openvino"}
    gains = {
        name: row["speed"]["over_original"] * (1 - row["speed"]["over_original_spread"])
        for name, row in rows.items()
        if row["accuracy"]["is_met"]
    }
    assert gains[outcome.report["method"]] == pytest.approx(max(gains.values()), abs=0.01), "figures are rounded"
    assert rows["static"]["recipe"]["calibration"] in ("minmax", "entropy", "percentile")


def test_a_method_that_fails_in_shape_inference_is_passed_over_with_the_reason(dense: ModelFolder) -> None:
    file = dense.path / "1" / "model.onnx"
    model = onnx.load(file)
    # As in some exported networks: the stated shape of an intermediate result contradicts the inferred one.
    model.graph.value_info.append(helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, ["n", 7]))
    onnx.save(model, file)
    outcome = quantize(read_model_folder(dense.path), QuantizationOptions())
    rows = {row["method"]: row for row in outcome.report["candidates"]}
    assert "shape_inference failed" in rows["dynamic"]["problem"]
    assert outcome.report["method"] == "openvino"
    assert outcome.version == "2"


def test_labels_are_compared_for_classifiers(tmp_path: Path) -> None:
    path = write_dense(tmp_path, settings="")
    (path / "model.yaml").write_text("task: classify\nclassify:\n  input: tensor\n  top_k: 3\n")
    (path / "1" / "labels.txt").write_text("\n".join(f"label {number}" for number in range(16)))
    report = quantize(
        read_model_folder(path), QuantizationOptions(method="dynamic", calibration=write_inputs(tmp_path))
    ).report
    best = [outputs(path / version / "model.onnx", make_inputs()[::2]).argmax(axis=1) for version in ("1", "2")]
    assert report["accuracy"]["measure"] == "label agreement"
    assert report["accuracy"]["value"] == np.mean(best[0] == best[1])
    assert report["accuracy"]["details"]["of"] == 12
    assert 0 <= report["accuracy"]["details"]["score_difference_max"] < 0.2


def test_an_original_served_in_fp32_is_measured_once(dense: ModelFolder) -> None:
    report = quantize(dense, QuantizationOptions(method="dynamic")).report
    assert report["original"]["per_s"] == report["original"]["fp32_per_s"]
    assert report["speed"]["over_original"] == report["speed"]["over_fp32"]


def test_publish_variant_makes_a_version_for_the_engine(dense: ModelFolder) -> None:
    assert publish_variant(dense, "1", "onnx", "int8") == "2"
    assert publish_variant(dense, "2", "openvino", "fp16") == "3"  # converted from version 1, the original of version 2
    assert read_report(dense.path, "3")["of_version"] == "1"  # type: ignore[index]
    folder = read_model_folder(dense.path)
    assert folder.versions == ("3",)
    assert folder.settings_of("3").engine == "openvino"
    assert folder.file("3").name == "model.xml"
    with pytest.raises(ConfigError, match="engine: torch has no conversion to int8"):
        publish_variant(dense, "1", "torch", "int8")


def test_weights_in_a_separate_file_are_converted_and_not_copied(tmp_path: Path) -> None:
    path = write_dense(tmp_path, is_external=True)
    folder = read_model_folder(path)
    outcome = quantize(folder, QuantizationOptions(method="dynamic"))
    assert outcome.report["original"]["size_bytes"] > (path / "1" / "weights.data").stat().st_size
    assert sorted(file.name for file in (path / "2").iterdir()) == ["model.onnx", "quantization.json", "version.yaml"]
    assert outcome.report["accuracy"]["value"] > 0.98
    (path / "1" / "weights.data").unlink()
    assert outputs(path / "2" / "model.onnx", make_inputs(2)).shape == (2, 16)
    with pytest.raises(ConfigError, match=r"its weights are in weights\.data, which does not exist"):
        quantize(folder, QuantizationOptions(version="1", method="dynamic"))


def test_models_that_cannot_be_quantized_are_refused_with_the_reason(dense: ModelFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no version 7; its versions are 1"):
        quantize(dense, QuantizationOptions(version="7"))
    with pytest.raises(ConfigError, match="--method static does not convert to fp16"):
        quantize(dense, QuantizationOptions(precision="fp16", method="static"))
    write_identity(tmp_path, "identity", "FP32")
    with pytest.raises(ConfigError, match="has nothing to quantize"):
        quantize(read_model_folder(tmp_path / "identity"), QuantizationOptions())
    python = tmp_path / "code"
    (python / "1").mkdir(parents=True)
    (python / "1" / "model.py").write_text("")
    tensor = "[{name: x, datatype: FP32, shape: [-1]}]"
    (python / "model.yaml").write_text(f"engine: python\npython:\n  inputs: {tensor}\n  outputs: {tensor}\n")
    with pytest.raises(ConfigError, match="export the model to ONNX"):
        quantize(read_model_folder(python), QuantizationOptions())


def test_an_int8_model_is_refused(dense: ModelFolder, tmp_path: Path) -> None:
    quantize(dense, QuantizationOptions(method="dynamic"))
    with pytest.raises(ConfigError, match="version 2 is already int8, made from version 1; use --version 1"):
        quantize(read_model_folder(dense.path), QuantizationOptions(method="dynamic"))
    (dense.path / "2" / "quantization.json").unlink()  # without a report, the file itself shows its precision
    with pytest.raises(ConfigError, match="version 2 is already int8"):
        quantize(read_model_folder(dense.path), QuantizationOptions(method="dynamic"))
    assert quantize(read_model_folder(dense.path), QuantizationOptions(version="1", method="dynamic")).version == "3"


def test_a_versions_own_settings_are_copied(dense: ModelFolder) -> None:
    (dense.path / "1" / "version.yaml").write_text("batching:\n  max_rows: 7\n")
    quantize(read_model_folder(dense.path), QuantizationOptions(method="dynamic"))
    settings = read_model_folder(dense.path).settings_of("2")
    assert (settings.batching.max_rows, settings.engine, settings.precision) == (7, "onnx", "fp32")


def test_keep_serving_pins_the_current_version(dense: ModelFolder) -> None:
    (dense.path / "model.yaml").write_text("# mine\ntask: tensor\n")
    quantize(dense, QuantizationOptions(method="dynamic", has_to_keep_serving=True))
    assert "# mine" in (dense.path / "model.yaml").read_text()
    assert read_model_folder(dense.path).versions == ("1",)
    assert (dense.path / "2" / "model.onnx").is_file()


def test_an_unwritable_folder_is_reported() -> None:
    nobodys = Path("/proc/self")  # even root cannot create folders there
    with pytest.raises(ConfigError, match="/proc/self: cannot be written"), create_staging_folder(nobodys):
        pass


def test_a_missing_nncf_is_reported_with_the_command_to_install_it(
    dense: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock-serve\[quantize\]'"):
        quantize(dense, QuantizationOptions(method="openvino"))


def test_a_killed_run_leaves_nothing_served_and_the_next_run_cleans_up(dense: ModelFolder) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from penstock.models.convert.publish import create_staging_folder\n"
        "with create_staging_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'model.onnx').write_text('half'); print('there', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(dense.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    with create_staging_folder(dense.path):
        assert len(list(dense.path.glob(".quantize-*"))) == 2  # the folder of a live run stays
    process.kill()
    process.communicate()
    assert len(list(dense.path.glob(".quantize-*"))) == 1
    assert read_model_folder(dense.path).versions == ("1",)
    with create_staging_folder(dense.path) as mine:
        assert list(dense.path.glob(".quantize-*")) == [mine]
    assert sorted(entry.name for entry in dense.path.iterdir()) == ["1", "model.yaml"]


def test_concurrent_runs_get_different_version_numbers(dense: ModelFolder) -> None:
    count = 12
    barrier = threading.Barrier(count)
    found: list[str] = []

    def work(number: int) -> None:
        with create_staging_folder(dense.path) as folder:
            (folder / "model.onnx").write_text(str(number))
            barrier.wait(30)
            found.append(publish(folder, dense.path, {"number": number}))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found, key=int) == [str(number) for number in range(2, count + 2)]
    contents = {int((dense.path / version / "model.onnx").read_text()) for version in found}
    assert contents == set(range(count))
    assert not list(dense.path.glob(".*"))


def test_a_version_number_taken_meanwhile_is_not_overwritten(
    dense: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([1, 2])
    monkeypatch.setattr("penstock.models.convert.publish._newest_version", lambda model: next(seen))
    (dense.path / "2").mkdir()
    (dense.path / "2" / "model.onnx").write_text("theirs")
    with create_staging_folder(dense.path) as folder:
        (folder / "model.onnx").write_text("mine")
        assert publish(folder, dense.path, {}) == "3"
    assert [(dense.path / version / "model.onnx").read_text() for version in ("2", "3")] == ["theirs", "mine"]


def test_a_model_on_tensorrt_is_converted_without_a_gpu(tmp_path: Path) -> None:
    """ONNX Runtime compares the variants, and the published version keeps engine: tensorrt."""
    write_dense(tmp_path, settings="engine: tensorrt\n")
    outcome = quantize(read_model_folder(tmp_path / "dense"), QuantizationOptions(precision="fp16"))
    assert (outcome.version, outcome.report["method"], outcome.report["engine"]) == ("2", "tensorrt", "tensorrt")
    assert outcome.report["original"]["engine"] == "onnx"
    settings = read_model_folder(tmp_path / "dense").settings_of("2")
    assert (settings.engine, settings.instances.device, settings.precision) == ("tensorrt", "cuda", "auto")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.npz", None, "must be an .npz file"),
        ("bad.npz", b"no zip", "must be an .npz file"),
        ("other.npz", {"z": np.zeros((8, 2))}, "has no 'x'; it has z"),
        ("few.npz", {"x": np.zeros((MIN_SAMPLES - 1, WIDTH), np.float32)}, "give at least"),
        ("text.npz", {"x": np.array(["a"] * 8)}, "the model takes FP32"),
        ("scalar.npz", {"x": np.float32(1)}, "the first dimension of all its arrays must be the number of samples"),
    ],
)
def test_unsuitable_calibration_files_are_refused(
    dense: ModelFolder, tmp_path: Path, name: str, content: object, reason: str
) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, dict):
        np.savez(file, **content)
    with pytest.raises(ConfigError, match=reason):
        quantize(dense, QuantizationOptions(method="dynamic", calibration=file))
    assert sorted(entry.name for entry in dense.path.iterdir()) == ["1", "model.yaml"]


def test_the_command_exits_with_1_for_a_refusal_and_2_for_an_error(dense: ModelFolder, tmp_path: Path) -> None:
    refused = run(
        cli.app, ["model", "quantize", "dense", "-r", str(tmp_path), "--method", "dynamic", "--min-accuracy", "1"]
    )
    assert refused.exit_code == 1
    assert "dense: refused: mean cosine" in refused.output
    assert "nothing was published" in refused.output
    done = run(cli.app, ["model", "quantize", str(dense.path), "--method", "dynamic", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["version"], report["method"], report["is_forced"]) == ("2", "dynamic", False)
    told = run(cli.app, ["model", "quantize", str(dense.path), "--version", "1", "--method", "dynamic"])
    assert "published as version 3" in told.output
    assert "versions: latest" in told.output
    assert "random numbers" in told.output
    wrong = run(cli.app, ["model", "quantize", "absent", "-r", str(tmp_path)])
    assert isinstance(wrong.exception, UnknownModel)
    assert run(cli.app, ["model", "quantize", "dense", "--precision", "int3"]).exit_code == 2


def test_the_nodes_that_lose_most_accuracy_are_found(tmp_path: Path) -> None:
    """An outlier in one input makes the range of bytes too coarse for the other values."""
    from penstock.engines.onnx.static_quantizer import StaticQuantizer

    graph = dense_graph()
    graph.node.insert(0, helper.make_node("Mul", ["x", "outlier"], ["spread"]))
    graph.node[1].input[0] = "spread"
    outlier = np.ones(WIDTH, np.float32)
    outlier[0] = 3000.0
    graph.initializer.append(onnx.numpy_helper.from_array(outlier, "outlier"))
    graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(
            np.concatenate([np.zeros((1, 64)), np.random.default_rng(1).standard_normal((WIDTH - 1, 64))]).astype(
                np.float32
            ),
            "w1",
        )
    )
    for number, node in enumerate(graph.node):
        node.name = f"{node.op_type}{number}"
    write_model(tmp_path, "outlier", graph)
    samples = [{"x": row[None]} for row in make_inputs()]
    (tmp_path / "work").mkdir()
    quantizer = StaticQuantizer(tmp_path / "outlier" / "1" / "model.onnx", samples, tmp_path / "work")
    assert quantizer.rank_by_sensitivity() == ["Gemm1", "Gemm3"]
    errors = {}
    for name, spared in (("all", []), ("spared", ["Gemm1"])):
        quantizer.write(tmp_path / name / "model.onnx", "minmax", spared)
        expected, found = (
            outputs(file, make_inputs())
            for file in (tmp_path / "outlier" / "1" / "model.onnx", tmp_path / name / "model.onnx")
        )
        errors[name] = float(np.abs(expected - found).mean())
    assert errors["spared"] < errors["all"] / 5


class FakeTask:
    """A task with inputs only, since samples need only their names and types."""

    def __init__(self, *inputs: tuple[str, str, tuple[int, ...]]) -> None:
        from penstock.core.tensors import TensorSpec
        from penstock.tasks.base import TaskSignature

        self.signature = TaskSignature(tuple(TensorSpec(*each) for each in inputs), (), 8)


def payloads(groups: object) -> list[bytes]:
    return [b"|".join(bytes(tensor.data) for tensor in request.inputs) for group in groups for request in group]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("task", "inputs", "unit"),
    [
        ("embed", [("text", "BYTES", (-1, 1))], "texts"),
        ("classify", [("text", "BYTES", (-1, 1))], "texts"),
        ("score", [("query", "BYTES", (-1, 1)), ("passage", "BYTES", (-1, 1))], "pairs"),
        ("upscale", [("image", "BYTES", (-1, 1))], "images"),
        ("tensor", [("x", "FP32", (-1, 3)), ("n", "INT64", (-1,))], "samples"),
    ],
)
def test_calibration_and_held_out_samples_are_disjoint(
    task: str, inputs: list[tuple[str, str, tuple[int, ...]]], unit: str
) -> None:
    samples = collect_samples(task, FakeTask(*inputs), None)  # type: ignore[arg-type]
    learnt, held_out = payloads(samples.calibration), payloads(samples.held_out)
    assert samples.unit == unit
    assert len(set(held_out)) == len(held_out) == samples.held_out_count
    assert not set(learnt) & set(held_out)
    assert len(samples.calibration_requests) >= 7
    if task == "embed":
        assert [len(group) for group in samples.held_out] == [60, 240]
    if task == "score":
        assert [len(group) for group in samples.held_out] == [20] * 20


def test_calibration_texts_can_come_from_the_users_file(tmp_path: Path) -> None:
    task = FakeTask(("text", "BYTES", (-1, 1)))
    texts = [f"text number {number} {'and more ' * (number % 9)}".strip() for number in range(90)]
    (tmp_path / "plain.txt").write_text("\n".join(texts))
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts))
    for name in ("plain.txt", "lines.jsonl"):
        samples = collect_samples("embed", task, tmp_path / name)  # type: ignore[arg-type]
        found = {payload[4:].decode() for payload in (*payloads(samples.calibration), *payloads(samples.held_out))}
        assert found <= set(texts)
        assert len(found) > 80
        assert not set(payloads(samples.calibration)) & set(payloads(samples.held_out))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"words": 1}\n')
    with pytest.raises(ConfigError, match=r'bad\.jsonl:2: must be an object with a "text"'):
        collect_samples("embed", task, tmp_path / "bad.jsonl")  # type: ignore[arg-type]
    (tmp_path / "few.txt").write_text("a\nb\nb\n")
    with pytest.raises(ConfigError, match="has 2 different texts"):
        collect_samples("embed", task, tmp_path / "few.txt")  # type: ignore[arg-type]


def test_bytes_of_unknown_meaning_need_samples() -> None:
    with pytest.raises(ConfigError, match=r"pass samples with --calibration FILE\.npz"):
        collect_samples("tensor", FakeTask(("x", "BYTES", (-1,))), None)  # type: ignore[arg-type]


def test_answers_that_are_not_numbers_have_no_accuracy(dense: ModelFolder, tmp_path: Path) -> None:
    graph = dense_graph()
    graph.initializer[3].CopyFrom(onnx.numpy_helper.from_array(np.full(16, np.nan, np.float32), "b2"))
    write_model(tmp_path, "broken", graph)
    files = [ModelFile(tmp_path / name / "1" / "model.onnx", tmp_path, dense.settings) for name in ("dense", "broken")]
    with load_model(files[0]) as original, load_model(files[1]) as broken:
        reference = Reference("tensor", original, collect_samples("tensor", original.task, None))
        assert reference.compare(original).value == 1.0
        with pytest.raises(ConfigError, match="NaN or infinite, but the original's answers are finite"):
            reference.compare(broken)
