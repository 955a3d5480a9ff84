"""Building engines of ONNX files with TensorRT-RTX itself, which needs no GPU."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from penstock.core.errors import ConfigError
from penstock.engines.engine_options import TensorRtOptions
from penstock.engines.onnx.onnx_variants import convert
from penstock.engines.tensorrt.engine_build import EnginePlan, build_engine_file, list_capabilities, plan_engine
from penstock.engines.tensorrt.engine_cache import key_of
from penstock.engines.tensorrt.library import TensorRtLibrary, find_library
from penstock.engines.tensorrt.shapes import ShapeLimits

pytest.importorskip("tensorrt_rtx_bindings")  # not installed on every machine
SRCNN = Path(__file__).parents[4] / "models" / "srcnn" / "1" / "model.onnx"
TILES = ShapeLimits(rows=2, side=64)


@pytest.fixture(scope="module")
def library() -> TensorRtLibrary:
    return find_library("tensorrt_rtx")


def plan(file: Path, library: TensorRtLibrary, limits: ShapeLimits = TILES, **options: object) -> EnginePlan:
    return plan_engine(file, limits, TensorRtOptions.model_validate(options), library)


def test_a_file_is_parsed_and_built(library: TensorRtLibrary) -> None:
    made = plan(SRCNN, library)
    assert [spec.shape for spec in (*made.inputs, *made.outputs)] == [(-1, 1, -1, -1)] * 2
    assert (made.precision, made.device, len(made.profiles)) == ("fp32", "any", 1)
    assert len(build_engine_file(made)) > 10_000


def test_a_file_in_fp16_is_built_unchanged(library: TensorRtLibrary, tmp_path: Path) -> None:
    convert(SRCNN, tmp_path / "model.onnx", "fp16")
    made = plan(tmp_path / "model.onnx", library, capabilities=[8.9])
    assert (made.precision, made.device) == ("fp16", "8.9")
    assert len(build_engine_file(made)) > 10_000


def test_the_cache_key_of_an_engine_depends_on_everything_that_matters(
    library: TensorRtLibrary, tmp_path: Path
) -> None:
    """The location of the file does not matter."""
    copied = tmp_path / "other.onnx"
    copied.write_bytes(SRCNN.read_bytes())
    one = key_of(plan(SRCNN, library).facts())
    assert key_of(plan(copied, library, capabilities=[]).facts()) == one
    convert(SRCNN, tmp_path / "model.onnx", "fp16")
    others = [
        plan(tmp_path / "model.onnx", library),
        plan(SRCNN, library, ShapeLimits(rows=3, side=64)),
        plan(SRCNN, library, capabilities=["8.9"]),
    ]
    newer = TensorRtLibrary("tensorrt_rtx", "99", library.module, library.errors, library.logger)
    assert len({one, key_of(plan(SRCNN, newer).facts()), *(key_of(each.facts()) for each in others)}) == 5


def test_only_supported_gpus_are_accepted(library: TensorRtLibrary) -> None:
    assert {"8.0", "8.6", "8.9", "12.0"} <= set(list_capabilities(library))
    with pytest.raises(ConfigError, match=r"TensorRT-RTX does not build for 7\.0; use 8\.0, 8\.6"):
        build_engine_file(plan(SRCNN, library, capabilities=["7.0"]))


def write(path: Path, operation: str, datatype: int = T.FLOAT) -> Path:
    values = [helper.make_tensor_value_info(name, datatype, ["n", 4]) for name in ("x", "y")]
    network = helper.make_graph([helper.make_node(operation, ["x"], ["y"])], "g", values[:1], values[1:])
    model = helper.make_model(network, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, path)
    return path


def test_unsupported_operations_are_reported(library: TensorRtLibrary, tmp_path: Path) -> None:
    unknown = write(tmp_path / "unknown.onnx", "Multinomial")
    with pytest.raises(ConfigError, match=r"unknown\.onnx: TensorRT-RTX [0-9.]+ cannot .*Multinomial") as raised:
        build_engine_file(plan(unknown, library))
    assert raised.value.reason == "engine_not_built"
    doubles = write(tmp_path / "doubles.onnx", "Relu", T.DOUBLE)
    with pytest.raises(ConfigError, match="'x' is FP64, which TensorRT does not support; use engine: onnx"):
        plan(doubles, library)
    (tmp_path / "model.xml").write_text("<net/>")
    with pytest.raises(ConfigError, match="reads only ONNX"):
        plan(tmp_path / "model.xml", library)


def test_a_missing_library_is_reported() -> None:
    with pytest.raises(
        ConfigError, match=r"TensorRT is not installed: pip install 'penstock-serve\[tensorrt\]'"
    ) as raised:
        find_library("tensorrt")
    assert raised.value.reason == "package_missing"
    assert find_library("auto").name == "tensorrt_rtx"
