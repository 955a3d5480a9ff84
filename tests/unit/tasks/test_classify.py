"""The classify task, with a real classifier of digits for images and tensors, and an imported one for texts."""

import gc
import weakref
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from PIL import Image

from penstock.core.errors import ConfigError, EngineFailed, InvalidImage, InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, from_array, to_array
from penstock.models.importing import import_checkpoint
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.base import Piece, Prepared, TaskRequest
from penstock.tasks.classify import ClassifyTask, RowLimits
from penstock.tasks.images.decoding import DecodedImage, ImageHeader
from penstock.tasks.images.decoding import decode as image_decode
from penstock.tasks.options import ClassifyOptions
from tests.checkpoints import compute_reference_logits, save_classifier
from tests.digits import NAMES, png, train_classifier, write_digits
from tests.servers import write_model
from tests.unit.tasks.runs import Loaded, column, load_model

HELD_OUT = 200
LOGITS = TensorSpec("logits", "FP32", (-1, 3))
IMAGE_3 = TensorSpec("x", "FP32", (-1, 3, 4, 6))
PLAIN: dict[str, Any] = {"mean": [0], "std": [1 / 255]}  # leaves a pixel's value unchanged


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(write_digits(tmp_path_factory.mktemp("models"), "images", ["n", 1, 8, 8]).parent)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(write_digits(tmp_path_factory.mktemp("models"), "tensors", ["n", 64], "").parent)


def probabilities(rows: Array) -> Array:
    """Return the probabilities that scikit-learn computes."""
    found: Array = train_classifier()[0].predict_proba(rows)
    return found


def ask(*files: bytes, outputs: tuple[str, ...] = (), **parameters: Any) -> TaskRequest:
    return TaskRequest([column("image", files)], list(outputs), parameters)


def ask_rows(rows: Array, outputs: tuple[str, ...] = (), **parameters: Any) -> TaskRequest:
    return TaskRequest([from_array("pixels", rows.astype(np.float32))], list(outputs), parameters)


# --- a real classifier


def test_signature_has_the_inputs_and_outputs_of_clients(images: Loaded, tensors: Loaded) -> None:
    assert images.task.signature.inputs == (TensorSpec("image", "BYTES", (-1, 1)),)
    assert tensors.task.signature.inputs == (TensorSpec("pixels", "FP32", (-1, 64)),)
    for loaded in (images, tensors):
        names = [(spec.name, spec.datatype, spec.shape) for spec in loaded.task.signature.outputs]
        assert names == [("label", "BYTES", (-1, -1)), ("score", "FP32", (-1, -1))]
        assert loaded.task.signature.max_batch_size == 32


def test_held_out_images_of_digits_are_classified(images: Loaded) -> None:
    _, pixels, truth = train_classifier()
    right = 0
    for start in range(0, HELD_OUT, 20):
        rows = slice(start, start + 20)
        answer = images.run(ask(*map(png, pixels[rows])))
        assert answer["label"].shape == answer["score"].shape == (20, 1)
        names = [label.decode() for label in answer["label"][:, 0]]
        right += sum(name == NAMES[digit] for name, digit in zip(names, truth[rows], strict=True))
        np.testing.assert_allclose(answer["score"][:, 0], probabilities(pixels[rows]).max(axis=1), atol=1e-4)
    assert right / HELD_OUT > 0.9


def test_held_out_tensors_of_digits_are_classified(tensors: Loaded) -> None:
    _, pixels, truth = train_classifier()
    answer = tensors.run(ask_rows(pixels[:32], top_k=10))
    assert answer["label"].shape == (32, 10)
    expected = probabilities(pixels[:32])
    order = np.argsort(-expected, axis=1)
    assert [[label.decode() for label in row] for row in answer["label"]] == [[NAMES[c] for c in row] for row in order]
    np.testing.assert_allclose(answer["score"], np.take_along_axis(expected, order, axis=1), atol=1e-4)
    assert np.mean(order[:, 0] == truth[:32]) > 0.9


def test_classifier_of_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
    script = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "docs/tasks.md", "exec"), {})
    answer = load_model(tmp_path / "models" / "digits").run(ask((tmp_path / "seven.png").read_bytes(), top_k=3))
    assert answer["label"].tolist() == [[b"seven", b"nine", b"eight"]]


@pytest.mark.parametrize("kind", ["images", "tensors"])
def test_batching_does_not_change_answers(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(kind)
    _, pixels, _ = train_classifier()
    parts = [pixels[:3], pixels[3:4], pixels[4:9]]
    requests = [ask(*map(png, part)) if kind == "images" else ask_rows(part) for part in parts]
    for each, one in zip(loaded.run_together(*requests), requests, strict=True):
        alone = loaded.run(one)
        assert each["label"].tolist() == alone["label"].tolist()
        np.testing.assert_allclose(each["score"], alone["score"], atol=1e-6)


def test_a_network_of_one_image_at_a_time_is_served(tmp_path: Path) -> None:
    loaded = load_model(write_digits(tmp_path, "single", [1, 1, 8, 8]).parent)
    pieces = loaded.task.prepare(ask(*map(png, train_classifier()[1][:2]))).pieces
    assert pieces[0].key != pieces[1].key
    assert [{name: array.shape for name, array in each.items()} for each in loaded.task.warm_up_inputs()] == [
        {"pixels": (1, 1, 8, 8)}
    ]


def test_text_classifier_equals_transformers(tmp_path: Path) -> None:
    texts = ["a good day", "", "terrible, " * 300, "zażółć"]
    labels = ["bad", "so so", "good\ngreat"]
    source = save_classifier(tmp_path / "source", labels)
    assert import_checkpoint(source, tmp_path / "mood", engine="onnx") == "classify"
    loaded = load_model(tmp_path / "mood")
    request = TaskRequest([column("text", texts)], [], {"top_k": 3})
    answer = loaded.run(request)
    logits = compute_reference_logits(source, texts).astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-shares, axis=1)
    np.testing.assert_allclose(answer["score"], np.take_along_axis(shares, order, axis=1), atol=1e-4)
    names = ["bad", "so so", "good great"]  # labels may contain blanks
    assert [[label.decode() for label in row] for row in answer["label"]] == [[names[c] for c in row] for row in order]
    prepared = loaded.task.prepare(request)
    assert prepared.parameters == {"tokens": sum(piece.rows * piece.length for piece in prepared.pieces)}
    for inputs in loaded.task.warm_up_inputs():
        loaded.engine.warm_up(inputs)


# --- labels, top_k, activations


def make(
    folder: Path,
    given: TensorSpec = IMAGE_3,
    gives: TensorSpec = LOGITS,
    labels: str | None = "a\nb\nc\n",
    max_rows: int = 32,
    **options: Any,
) -> ClassifyTask:
    if labels is not None:
        (folder / "labels.txt").write_text(labels, encoding="utf-8")
    chosen = ClassifyOptions.model_validate(options)
    return ClassifyTask(folder, chosen, RowLimits(max_rows), Signature((given,), (gives,), "onnx", "fp32"))


ROWS = TensorSpec("x", "FP32", (-1, 2))


def answer_to(task: ClassifyTask, logits: Any, *outputs: str, **parameters: Any) -> dict[str, Any]:
    array = np.array(logits, np.float32) if not isinstance(logits, np.ndarray) else logits
    request = TaskRequest([from_array("x", np.zeros((len(array), 2), np.float32))], list(outputs), parameters)
    prepared = task.prepare(request)
    results = task.split(prepared.pieces, [array])
    return {tensor.name: to_array(tensor) for tensor in task.finish(request, prepared, results)}


def test_equal_scores_come_in_the_order_of_the_labels(tmp_path: Path) -> None:
    task = make(tmp_path, ROWS)
    assert answer_to(task, [[1, 1, 1]])["label"].tolist() == [[b"a"]]
    found = answer_to(task, [[1, 2, 2], [5, 0, 5]], top_k=3)
    assert found["label"].tolist() == [[b"b", b"c", b"a"], [b"a", b"c", b"b"]]
    labels = [str(number) for number in range(500)]
    many = make(tmp_path, ROWS, TensorSpec("logits", "FP32", (-1, 500)), labels="\n".join(labels))
    odd_first = answer_to(many, [[float(number % 2) for number in range(500)]], top_k=500)["label"][0]
    assert [label.decode() for label in odd_first] == labels[1::2] + labels[::2]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("none", [1000.0, -3.0, -1000.0]), ("softmax", [1.0, 0.0, 0.0]), ("sigmoid", [1.0, 0.04742587, 0.0])],
)
def test_activations_do_not_overflow(tmp_path: Path, activation: str, expected: list[float]) -> None:
    task = make(tmp_path, ROWS, activation=activation)
    found = answer_to(task, [[1000.0, -3.0, -1000.0]], top_k=3)
    assert found["score"][0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_other_floats_are_answered_as_fp32(tmp_path: Path, dtype: str) -> None:
    import ml_dtypes

    kind, name = {
        "float16": (np.float16, "FP16"),
        "float64": (np.float64, "FP64"),
        "bfloat16": (ml_dtypes.bfloat16, "BF16"),
    }[dtype]
    task = make(tmp_path, ROWS, TensorSpec("logits", name, (-1, 3)))
    found = answer_to(task, np.array([[1, 2, 0]]).astype(kind), top_k=2)
    assert found["score"].dtype == np.float32
    assert found["score"][0].tolist() == pytest.approx([0.66524094, 0.24472848])


def test_answer_has_the_requested_outputs(tmp_path: Path) -> None:
    task = make(tmp_path, ROWS, top_k=2)
    assert list(answer_to(task, [[1, 2, 3]])) == ["label", "score"]
    assert list(answer_to(task, [[1, 2, 3]], "score")) == ["score"]
    assert list(answer_to(task, [[1, 2, 3]], "score", "label")) == ["score", "label"]
    assert answer_to(task, [[1, 2, 3]], "label")["label"].tolist() == [[b"c", b"b"]]
    with pytest.raises(InvalidTensor, match="unknown output 'logits'; this model has 'label', 'score'"):
        answer_to(task, [[1, 2, 3]], "logits")


@pytest.mark.parametrize("top_k", [0, -1, 4, 10**12, True, "2", 1.5])
def test_wrong_top_k_is_rejected(tmp_path: Path, top_k: Any) -> None:
    with pytest.raises(InvalidRequest, match="'top_k' must be a whole number from 1 to 3, got"):
        answer_to(make(tmp_path, ROWS), [[1, 2, 3]], top_k=top_k)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, r"labels.txt: no such file: create the file with one label per line"),
        ("a\nb\n", "labels.txt has 2 labels, but 'logits' has 3 classes: write one line for each"),
        ("a\nb\nc\nd", "has 4 labels, but 'logits' has 3"),
        ("a\n\nc\n", "labels.txt: line 2 has no label"),
        ("", "labels.txt: line 1 has no label"),
    ],
)
def test_labels_that_do_not_fit_are_rejected(tmp_path: Path, labels: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, ROWS, labels=labels)


def test_labels_may_have_any_letters_and_line_ends(tmp_path: Path) -> None:
    task = make(tmp_path, ROWS, labels="\ufeffzażółć\r\n犬\r\nstray\u2028cat\r\n\r\n")
    labels = [label.decode() for label in answer_to(task, [[3, 2, 1]], top_k=3)["label"][0]]
    assert labels == ["zażółć", "犬", "stray\u2028cat"]


def test_labels_in_another_encoding_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes("é\nb\nc".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"labels.txt: cannot be read as UTF-8"):
        make(tmp_path, ROWS, labels=None)


def test_open_number_of_classes_is_checked_on_the_first_answer(tmp_path: Path) -> None:
    task = make(tmp_path, ROWS, TensorSpec("logits", "FP32", (-1, -1)))
    assert answer_to(task, [[1, 2, 3]])["label"].tolist() == [[b"c"]]
    with pytest.raises(
        EngineFailed, match=r"has the shape \[1, 4\], but \[rows, 3\] was expected: the labels file needs one line"
    ):
        answer_to(task, [[1, 2, 3, 4]])


def test_a_top_k_beyond_the_labels_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"classify.top_k: 4 is more than the 3 labels"):
        make(tmp_path, ROWS, top_k=4)


def test_batch_with_missing_rows_fails(tmp_path: Path) -> None:
    task = make(tmp_path, ROWS)
    with pytest.raises(EngineFailed, match="returned 1 rows for 3 rows of input; set is_batched: false"):
        task.split([Piece({}, rows=2), Piece({})], [np.zeros((1, 3), np.float32)])


# --- tensors as the tensor task takes them


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (from_array("pixels", np.zeros((1, 63), np.float32)), InvalidTensor, r"takes \[-1, 64\]"),
        (from_array("pixels", np.zeros((1, 64), np.float64)), InvalidTensor, "is FP64; the model takes FP32"),
        (from_array("image", np.zeros((1, 64), np.float32)), InvalidTensor, "unknown input 'image'"),
        (from_array("pixels", np.zeros((0, 64), np.float32)), InvalidTensor, "no rows"),
        (from_array("pixels", np.zeros((33, 64), np.float32)), RequestTooLarge, "at most 32"),
        (Tensor("pixels", "FP32", (1, 64), b"short"), InvalidTensor, "5 bytes of data"),
    ],
)
def test_wrong_tensor_is_rejected(tensors: Loaded, tensor: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tensors.task.prepare(TaskRequest([tensor], []))


def test_tensors_of_several_rows_are_one_piece(tensors: Loaded) -> None:
    assert tensors.task.is_prepare_cheap
    (piece,) = tensors.task.prepare(ask_rows(np.zeros((5, 64)))).pieces
    assert (piece.rows, piece.key) == (5, ((64,),))
    for inputs in tensors.task.warm_up_inputs():
        tensors.engine.warm_up(inputs)


# --- images


def picture(width: int, height: int, color: Any = (10, 20, 30), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height), color)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels_of(task: ClassifyTask, image: Image.Image | bytes) -> Array:
    file = image if isinstance(image, bytes) else file_of(image)
    (array,) = task.join(task.prepare(ask(file)).pieces).values()
    found: Array = array[0]
    return found


def test_a_pixel_is_scaled_by_channel(tmp_path: Path) -> None:
    task = make(tmp_path, mean=[0.1, 0.2, 0.3], std=[0.5, 0.25, 0.125])
    found = pixels_of(task, picture(6, 4))
    assert (found.shape, found.dtype.name) == ((3, 4, 6), "float32")
    expected = [(10 / 255 - 0.1) / 0.5, (20 / 255 - 0.2) / 0.25, (30 / 255 - 0.3) / 0.125]
    assert found[:, 2, 3].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((-1, 3, 4, 6), {}, [10, 20, 30]),
        ((-1, 3, 4, 6), {"colors": "bgr"}, [30, 20, 10]),
        ((-1, 4, 6, 3), {}, [10, 20, 30]),
        ((-1, 4, 6, 3), {"colors": "bgr"}, [30, 20, 10]),
        ((-1, 1, 4, 6), {"colors": "gray"}, [18]),
        ((-1, 4, 6, 1), {"colors": "gray"}, [18]),
        ((-1, 3, -1, -1), {"size": 5}, [10, 20, 30]),
    ],
)
def test_pixels_have_the_layout_of_the_network(tmp_path: Path, shape: Any, options: Any, expected: list[int]) -> None:
    task = make(tmp_path, TensorSpec("x", "FP32", shape), **options, **PLAIN)
    found = pixels_of(task, picture(60, 40))
    assert all(want in (-1, got) for want, got in zip(shape[1:], found.shape, strict=True))
    planes = found if shape[1] in (1, 3) else found.transpose(2, 0, 1)
    assert planes[:, 1, 1].tolist() == pytest.approx(expected, abs=1e-3)
    assert set(planes.shape[1:]) in ({4, 6}, {5})


def test_pixels_have_the_datatype_of_the_network(tmp_path: Path) -> None:
    found = pixels_of(make(tmp_path, TensorSpec("x", "UINT8", (-1, 3, 4, 6))), picture(6, 4))
    assert (found.dtype.name, found[:, 0, 0].tolist()) == ("uint8", [10, 20, 30])
    found = pixels_of(make(tmp_path, TensorSpec("x", "FP16", (-1, 3, 4, 6)), **PLAIN), picture(6, 4))
    assert (found.dtype.name, found[:, 0, 0].tolist()) == ("float16", [10, 20, 30])


SQUARE = TensorSpec("x", "FP32", (-1, 3, 8, 8))


def striped() -> Image.Image:
    """Return a picture of 24 × 8 pixels with a red, a green and a blue square."""
    image = picture(24, 8, "red")
    image.paste("lime", (8, 0, 16, 8))
    image.paste("blue", (16, 0, 24, 8))
    return image


def test_crop_keeps_the_middle(tmp_path: Path) -> None:
    found = pixels_of(make(tmp_path, SQUARE, **PLAIN), striped())
    assert found.reshape(3, -1).min(axis=1).tolist() == pytest.approx([0, 255, 0], abs=1e-3)
    assert found.reshape(3, -1).max(axis=1).tolist() == pytest.approx([0, 255, 0], abs=1e-3)


def test_stretch_keeps_the_whole_image(tmp_path: Path) -> None:
    found = pixels_of(make(tmp_path, SQUARE, fit="stretch", **PLAIN), striped())
    assert found[0, :, 0].min() == found[2, :, 7].min() == pytest.approx(255)
    assert found[1, 4, 4] > 200


def test_pad_keeps_the_whole_image_with_black_bands(tmp_path: Path) -> None:
    found = pixels_of(make(tmp_path, SQUARE, fit="pad", **PLAIN), striped())
    assert not found[:, :2].any()
    assert not found[:, 6:].any()
    assert found[0, 3, 0] == found[2, 3, 7] == pytest.approx(255)


@pytest.mark.parametrize("fit", ["crop", "stretch", "pad"])
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (7, 13), (1001, 333), (8, 8)])
def test_image_of_any_size_is_fitted(tmp_path: Path, fit: str, size: tuple[int, int]) -> None:
    assert pixels_of(make(tmp_path, SQUARE, fit=fit), picture(*size)).shape == (3, 8, 8)
    wide = TensorSpec("x", "FP32", (-1, 3, 5, 11))
    assert pixels_of(make(tmp_path, wide, fit=fit), picture(*size)).shape == (3, 5, 11)


def test_exif_orientation_of_a_photograph_is_applied(tmp_path: Path) -> None:
    image = picture(32, 32, "blue")
    image.paste("red", (0, 0, 16, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise: the left side becomes the top
    found = pixels_of(make(tmp_path, SQUARE, **PLAIN), file_of(image, "JPEG", exif=exif, quality=95))
    assert found[0, 1, 4] > 200 > 55 > found[0, 6, 4]


@pytest.mark.parametrize(("mode", "color"), [("L", 20), ("LA", (20, 9)), ("RGBA", (20, 20, 20, 9)), ("P", 0), ("1", 1)])
def test_every_image_mode_is_accepted(tmp_path: Path, mode: str, color: Any) -> None:
    for colors, shape in (("rgb", (-1, 3, 4, 6)), ("gray", (-1, 1, 4, 6))):
        task = make(tmp_path, TensorSpec("x", "FP32", shape), colors=colors, **PLAIN)
        found = pixels_of(task, file_of(picture(6, 4, color, mode)))
        wanted = {"P": 0, "1": 255}.get(mode, 20)
        assert found.reshape(-1).tolist() == pytest.approx([wanted] * found.size, abs=1e-3)


def bomb() -> bytes:
    """Return a PNG file that declares 60,000 × 60,000 pixels and has none."""
    small = file_of(picture(2, 2))
    import struct
    import zlib

    header = b"IHDR" + struct.pack(">II", 60_000, 60_000) + small[24:29]
    return small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "element 1: the data is not a JPEG or PNG image"),
        (b"garbage", "element 1: the data is not a JPEG or PNG image"),
        (b"GIF89a", "element 1: the data is not a JPEG or PNG image"),
        (file_of(picture(64, 64), "JPEG")[:200], "element 1: the .* damaged"),
        (file_of(picture(600, 600, (1, 2, 3)))[:-40], "element 1: the image is damaged or cut short"),
        (bomb(), "element 1: the image's header declares 60000 × 60000 pixels; this model takes at most 25000000"),
    ],
)
def test_invalid_image_is_rejected(images: Loaded, file: bytes, message: str) -> None:
    with pytest.raises(InvalidImage, match=f"input 'image' {message}"):
        images.task.prepare(ask(file_of(picture(2, 2)), file))


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (TaskRequest([column("file", ["a"])], []), InvalidTensor, "takes one input, 'image' .* got 'file'"),
        (TaskRequest([Tensor("image", "UINT8", (1,), b"a")], []), InvalidTensor, r"got UINT8 \[1\]"),
        (
            TaskRequest([Tensor("image", "BYTES", (0, 1), b"")], []),
            InvalidRequest,
            "has no rows; send at least one image",
        ),
        (ask(*[b"a"] * 33), RequestTooLarge, "has 33 images; send at most 32 per request"),
    ],
)
def test_wrong_request_is_rejected(images: Loaded, request_: TaskRequest, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        images.task.prepare(request_)


def test_rejected_request_decodes_nothing(images: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.tasks.images import image_files

    decoded: list[object] = []
    monkeypatch.setattr(image_files, "decode", decoded.append)
    with pytest.raises(InvalidImage):
        images.task.prepare(ask(file_of(picture(8, 8)), bomb()))
    assert decoded == []


def test_images_of_a_request_are_decoded_one_after_another(images: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the pixels of many large images would be in memory at the same time."""
    from penstock.tasks.images import image_files

    alive: list[weakref.ref[Image.Image]] = []
    most = 0

    def decode(header: ImageHeader) -> DecodedImage:
        nonlocal most
        gc.collect()
        alive.append(weakref.ref(header.image))
        most = max(most, sum(each() is not None for each in alive))
        return image_decode(header)

    monkeypatch.setattr(image_files, "decode", decode)
    images.task.prepare(ask(*[file_of(picture(50, 50))] * 5))
    assert len(alive) == 5
    assert most <= 2


def test_images_warm_up(images: Loaded) -> None:
    shapes = [inputs["pixels"].shape for inputs in images.task.warm_up_inputs()]
    assert shapes == [(1, 1, 8, 8), (32, 1, 8, 8)]
    for inputs in images.task.warm_up_inputs():
        images.engine.warm_up(inputs)


# --- networks and settings that do not fit


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((-1, 1, 8, 8), {}, r"classify.colors: rgb needs 3 channels, but 'x' is \[-1, 1, 8, 8\]; set colors: gray"),
        ((-1, 3, 8, 8), {"colors": "gray", **PLAIN}, "classify.colors: gray needs 1 channel"),
        ((-1, 3, -1, -1), {}, "classify.size: input 'x' .* has a dynamic height or width; set classify.size to"),
        ((-1, 3, 8, 8), {"size": 9}, "classify.size: 9 does not fit input 'x' .*; remove classify.size"),
        ((-1, 1, 8, 8), {"colors": "gray"}, r"classify.mean: 3 values for 1 channel\(s\) \(gray\); give 1"),
        ((-1, 3, 8, 8), {"std": [1, 2]}, r"classify.std: 2 values for 3 channel\(s\) \(rgb\); give 1 or 3"),
        ((4, 3, 8, 8), {}, "input 'x' has a fixed batch size of 4; export the model with a dynamic batch"),
        ((-1, 64), {"input": "image"}, r"classify.input: image needs 'x' to be .*; got FP32 \[-1, 64\]"),
        ((-1, 64), {"input": "text"}, "the classify task needs a network with inputs input_ids and attention_mask"),
        ((-1, 64), {"output": "scores"}, "classify.output: the network has no output 'scores'; its outputs are logits"),
    ],
)
def test_network_that_does_not_fit_is_rejected(tmp_path: Path, shape: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, TensorSpec("x", "FP32", shape), **options)


def test_output_of_another_kind_is_rejected(tmp_path: Path) -> None:
    for spec in (
        TensorSpec("y", "INT64", (-1, 3)),
        TensorSpec("y", "FP32", (-1, 3, 1)),
        TensorSpec("y", "FP32", (-1,)),
    ):
        with pytest.raises(ConfigError, match=r"classify.output: 'y' must be FP32 or FP16"):
            make(tmp_path, ROWS, spec)


def test_one_of_several_outputs_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    outputs = (TensorSpec("label", "INT64", (-1,)), TensorSpec("probabilities", "FP32", (-1, 3)))
    engine = Signature((ROWS,), outputs, "onnx", "fp32")
    with pytest.raises(
        ConfigError, match=r"classify.output: the network's outputs are label, probabilities: set classify.output"
    ):
        ClassifyTask(tmp_path, ClassifyOptions(), RowLimits(32), engine)
    options = ClassifyOptions(output="probabilities", activation="none")
    task = ClassifyTask(tmp_path, options, RowLimits(32), engine)
    assert task.engine_outputs == ("probabilities",)
    assert answer_to(task, [[0.1, 0.7, 0.2]])["label"].tolist() == [[b"b"]]


def test_image_network_may_take_tensors(tmp_path: Path) -> None:
    task = make(tmp_path, SQUARE, input="tensor")
    assert task.signature.inputs == (SQUARE,)
    request = TaskRequest([from_array("x", np.zeros((2, 3, 8, 8), np.float32))], [])
    assert task.prepare(request).pieces[0].rows == 2


def test_infinite_logits_are_accepted(tmp_path: Path) -> None:
    found = answer_to(make(tmp_path, ROWS), [[np.inf, 0, 0]])
    assert found["label"].tolist() == [[b"a"]]


def test_string_input_is_rejected_for_images(tmp_path: Path) -> None:
    """Use a real network, so that its signature is real, too."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "echo",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["n", 3])],
    )
    write_model(tmp_path, "echo", graph)
    with pytest.raises(ConfigError, match=r"classify.output: 'y' must be .*; got BYTES \[-1, 3\]"):
        Loaded(tmp_path / "echo" / "1", ModelSettings(task="classify"))


def test_finish_needs_no_state_of_prepare(images: Loaded) -> None:
    """With a context, every answer would have to return to the process that prepared the request."""
    request = ask(png(train_classifier()[1][0]), top_k=2)
    prepared = images.task.prepare(request)
    assert prepared.context is None
    scores = np.full((1, 10), 0.1, np.float32)
    (labels, _) = images.task.finish(request, Prepared([], parameters=prepared.parameters), [(scores,)])
    assert to_array(labels).tolist() == [[b"zero", b"one"]]
