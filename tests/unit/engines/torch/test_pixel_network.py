"""A network of pixels on its device gives the same as the CPU path around a network of planes, within one step."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.core.errors import ConfigError
from penstock.core.signature import SECOND_PREFIX, ImageWork, Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, pack_bytes, unpack_bytes
from penstock.engines.engine_options import TorchOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.torch.pixel_network import _Bicubic, _Colors, convert_to_pixels, takes_planes
from penstock.engines.torch.torch_devices import choose_target
from penstock.engines.torch.torch_engine import TorchEngine
from penstock.engines.torch.torch_files import open_file
from penstock.engines.torch.torch_model import TorchModel
from penstock.models.samples.photos import photos
from penstock.tasks.base import TaskRequest
from penstock.tasks.options import UpscaleOptions
from penstock.tasks.upscale import UpscaleTask

MODELS = Path(__file__).parents[4] / "models" / "srcnn" / "1"
OPTIONS = UpscaleOptions(tile=96)
CPU = torch.device("cpu")


def open_network() -> TorchModel:
    return open_file(MODELS / "model.onnx", TorchOptions(), choose_target("cpu", "auto"))


def photograph(mode: str, width: int = 60, height: int = 43) -> Image.Image:
    image = Image.open(BytesIO(photos()[0])).crop((20, 10, 20 + width, 10 + height))
    if mode.endswith("A"):
        image.putalpha(image.convert("L").rotate(90))
    return image.convert(mode)


def run(model: TorchModel, image: Image.Image, tile: int = 0, **parameters: str) -> Image.Image:
    inputs, outputs = model.inputs, model.outputs
    if "mode" in parameters:  # instead of a second network, with the same one before it
        inputs, outputs = (
            (specs[0], TensorSpec(SECOND_PREFIX + specs[0].name, specs[0].datatype, specs[0].shape))
            for specs in (inputs, outputs)
        )

    def infer(array: Array) -> Array:
        with torch.inference_mode():
            found: Array = model.forward([torch.from_numpy(np.array(array))]).numpy()
            return found

    return serve(Signature(inputs, outputs, "torch", "fp32", tile=tile), infer, image, parameters)


def serve(
    signature: Signature, infer: Callable[[Array], Array], image: Image.Image, parameters: Mapping[str, str]
) -> Image.Image:
    """Run the request like a worker."""
    task = UpscaleTask(OPTIONS, signature, 8)
    file = BytesIO()
    image.save(file, "PNG")
    request = TaskRequest([Tensor("image", "BYTES", (1,), pack_bytes([file.getvalue()]))], [], parameters)
    prepared = task.prepare(request)
    results: list[Sequence[Array]] = []
    for piece in prepared.pieces:
        (array,) = task.join([piece]).values()
        results += task.split([piece], [infer(array)])
    (answer,) = task.finish(request, prepared, results)
    return Image.open(BytesIO(unpack_bytes(answer)[0]))


def differ(one: Image.Image, other: Image.Image) -> int:
    assert (one.mode, one.size) == (other.mode, other.size)
    return int(np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).max())


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
@pytest.mark.parametrize("tile", [0, 2048])  # several tiles, and one tile
def test_an_image_equals_the_cpu_paths_result(mode: str, tile: int) -> None:
    planes, image = open_network(), photograph(mode)
    pixels = convert_to_pixels(open_network(), ImageWork(2, OPTIONS.overlap), CPU)
    assert differ(run(planes, image), run(pixels, image, tile)) <= 1


def test_a_network_for_all_planes_equals_the_cpu_paths_result() -> None:
    planes, image = open_network(), photograph("RGB")
    pixels = convert_to_pixels(open_network(), ImageWork(1, OPTIONS.overlap, is_for_colors=True), CPU)
    # A step in the blue or red plane is up to 1.8 in RGB.
    assert differ(run(planes, image, mode="denoise"), run(pixels, image, mode="denoise")) <= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_an_image_from_a_gpu_equals_the_cpu_paths_result(mode: str, precision: str) -> None:
    image = photograph(mode, 200, 150)
    work = ImageWork(2, OPTIONS.overlap)
    engine = TorchEngine(EngineSpec(MODELS / "model.onnx", precision, 1, 1, "cuda", image=work), TorchOptions())
    signature = engine.load()
    assert signature.inputs[0].datatype == "UINT8"
    assert signature.tile >= 512
    name = signature.inputs[0].name
    found = serve(signature, lambda array: engine.infer(0, {name: array}, [])[0], image, {})
    engine.close()
    assert differ(run(open_network(), image), found) <= (1 if precision == "fp32" else 2)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_interpolation_equals_pillows(scale: int) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (9, 21), dtype=np.uint8)
    expected = Image.fromarray(pixels).resize((21 * scale, 9 * scale), Image.Resampling.BICUBIC)
    found = _Bicubic(scale, CPU).enlarge(torch.from_numpy(pixels)[None, None].int())
    assert (found[0, 0].numpy() == np.asarray(expected)).all()


def test_colour_conversion_equals_pillows() -> None:
    values = np.arange(0, 256, 5, dtype=np.uint8)
    grid = np.stack(np.meshgrid(values, values, values), -1).reshape(1, -1, 3)
    expected = np.asarray(Image.frombytes("YCbCr", grid.shape[1::-1], grid.tobytes()).convert("RGB"), np.int16)
    layers = torch.from_numpy(grid.copy()).float()[None].unbind(3)
    found = _Colors(CPU).to_rgb(layers)[0].numpy().astype(np.int16)
    assert (found == expected).all()


def test_an_onnx_file_of_convolutions_is_converted() -> None:
    engine = TorchEngine(EngineSpec(MODELS / "model.onnx", "auto", 1, 1), TorchOptions())
    signature = engine.load()
    assert signature.inputs == (TensorSpec("luminance", "FP32", (-1, 1, -1, -1)),)
    assert takes_planes(open_network())
    x = np.random.default_rng(1).random((1, 1, 20, 30), np.float32)
    import onnxruntime

    session = onnxruntime.InferenceSession(MODELS / "model.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"luminance": x})
    (found,) = engine.infer(0, {"luminance": x}, [])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_other_onnx_files_are_refused(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="has Softmax; use engine: onnx or openvino"):
        open_file(tmp_path / "model.onnx", TorchOptions(), choose_target("cpu", "auto"))


def test_a_batch_runs_in_parts_within_the_limit_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = convert_to_pixels(open_network(), ImageWork(2, OPTIONS.overlap), CPU)
    batch = torch.from_numpy(np.random.default_rng(4).integers(0, 256, (5, 20, 30, 3), dtype=np.uint8))
    with torch.inference_mode():
        whole = pixels.forward([batch])
        monkeypatch.setattr("penstock.engines.torch.pixel_network.TOGETHER_PIXELS", 2 * 64 * 96)
        parts = pixels.forward([batch])
    assert whole.shape == (5, 40, 60, 3)
    assert int((whole.int() - parts.int()).abs().max()) <= 1
