"""The upscale task: accepted images, answers, and tiles without seams."""

import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image, ImageOps

from penstock.core.errors import Cancelled, ConfigError, InvalidImage, InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.requests import Parameter
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, pack_bytes, unpack_bytes
from penstock.models.samples.photos import photos
from penstock.tasks.base import TaskRequest
from penstock.tasks.images import decoding, image_files
from penstock.tasks.images.decoding import MAX_SIDE, DecodedImage, ImageHeader
from penstock.tasks.options import UpscaleOptions
from penstock.tasks.upscale import UpscaleTask

MODEL = Path(__file__).parents[3] / "models" / "srcnn" / "1" / "model.onnx"
PLANE = (-1, 1, -1, -1)
ENGINE = Signature(
    (TensorSpec("luminance", "FP32", PLANE),), (TensorSpec("luminance_sr", "FP32", PLANE),), "onnx", "fp32"
)
PAIR = Signature(
    (*ENGINE.inputs, TensorSpec("second.luminance", "FP32", PLANE)),
    (*ENGINE.outputs, TensorSpec("second.luminance_sr", "FP32", PLANE)),
    "onnx",
    "fp32",
)
Parameters = dict[str, Parameter]
Upscale = Callable[..., list[Image.Image]]


def make_task(max_rows: int = 8, **options: int) -> UpscaleTask:
    return UpscaleTask(UpscaleOptions.model_validate(options), PAIR, max_rows)


def make_request(
    images: Sequence[bytes], shape: tuple[int, ...] | None = None, parameters: Parameters | None = None
) -> TaskRequest:
    return TaskRequest([Tensor("image", "BYTES", shape or (len(images),), pack_bytes(images))], [], parameters or {})


def to_file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photograph(width: int = 64, height: int = 48) -> Image.Image:
    return Image.open(BytesIO(photos()[0])).crop((20, 10, 20 + width, 10 + height))


def differ(one: Image.Image, other: Image.Image) -> int:
    assert (one.mode, one.size) == (other.mode, other.size)
    return int(np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).max())


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])


@pytest.fixture
def upscale(session: onnxruntime.InferenceSession) -> Upscale:
    """Return a function that runs a request as a worker does: each piece alone, or equal keys in one batch."""

    def run(
        images: Sequence[bytes], is_batched: bool = True, parameters: Parameters | None = None, **options: int
    ) -> list[Image.Image]:
        task, request = make_task(**options), make_request(images, parameters=parameters)
        prepared = task.prepare(request)
        results: list[Sequence[Array]] = [()] * len(prepared.pieces)
        groups: dict[object, list[int]] = {}
        for index, piece in enumerate(prepared.pieces):
            groups.setdefault(piece.key if is_batched else index, []).append(index)
        for indices in groups.values():
            pieces = [prepared.pieces[index] for index in indices]
            inputs = {name.removeprefix("second."): array for name, array in task.join(pieces).items()}
            outputs = session.run(task.engine_outputs, inputs)
            for index, result in zip(indices, task.split(pieces, outputs), strict=True):
                results[index] = result
        (answer,) = task.finish(request, prepared, results)
        assert answer.shape == request.inputs[0].shape
        formats = [str((parameters or {}).get("format", "png"))]
        return [Image.open(BytesIO(file), formats=formats) for file in unpack_bytes(answer)]

    return run


# Answers


def test_signature_is_bytes_to_bytes() -> None:
    signature = make_task(max_rows=5).signature
    assert signature.inputs == signature.outputs == (TensorSpec("image", "BYTES", (-1, 1)),)
    assert signature.max_batch_size == 5


def test_network_sharpens_luminance_and_colour_is_bicubic(
    upscale: Upscale, session: onnxruntime.InferenceSession
) -> None:
    given = photograph()
    size = (given.width * 2, given.height * 2)
    y, cb, cr = (plane.resize(size, Image.Resampling.BICUBIC) for plane in given.convert("YCbCr").split())
    padded = np.pad(np.asarray(y), 8, mode="edge").astype(np.float32) / 255
    (sharp,) = session.run(None, {"luminance": padded[None, None]})
    plane = np.rint(np.clip(sharp[0, 0, 8:-8, 8:-8], 0, 1) * 255).astype(np.uint8)
    expected = Image.merge("YCbCr", (Image.fromarray(plane), cb, cr)).convert("RGB")
    (answer,) = upscale([to_file(given)])
    assert differ(answer, expected) <= 1


def test_the_answer_is_sharper_than_bicubic(upscale: Upscale) -> None:
    original = Image.open(BytesIO(photos()[0])).convert("L")
    half = original.resize((160, 120), Image.Resampling.BICUBIC)

    def error(image: Image.Image) -> float:
        return float(np.square(np.asarray(image, np.float64) - np.asarray(original)).mean())

    assert error(upscale([to_file(half)])[0]) < error(half.resize(original.size, Image.Resampling.BICUBIC))


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_scale_multiplies_both_sides(upscale: Upscale, scale: int) -> None:
    (answer,) = upscale([to_file(photograph(31, 17))], scale=scale)
    assert answer.size == (31 * scale, 17 * scale)


def test_even_one_pixel_is_an_image(upscale: Upscale) -> None:
    (answer,) = upscale([to_file(Image.new("RGB", (1, 1), (10, 200, 90)))])
    assert answer.size == (2, 2)
    assert differ(answer, Image.new("RGB", (2, 2), (10, 200, 90))) <= 12


@pytest.mark.parametrize("level", [0, 128, 255])
def test_a_flat_image_gets_no_visible_border(upscale: Upscale, level: int) -> None:
    """Zero padding would darken the border."""
    (answer,) = upscale([to_file(Image.new("L", (40, 40), level))], tile=32)
    pixels = np.asarray(answer).astype(int)
    assert np.ptp(pixels) <= 1
    assert abs(pixels[0, 0] - level) <= 12


# Tiles


@pytest.mark.parametrize(("width", "height"), [(64, 48), (61, 37), (25, 90), (24, 24), (13, 100)])
@pytest.mark.parametrize(("tile", "overlap"), [(64, 8), (48, 8), (33, 10)])
def test_seams_are_invisible(upscale: Upscale, width: int, height: int, tile: int, overlap: int) -> None:
    image = to_file(photograph(width, height))
    (whole,), (tiled,) = upscale([image], tile=4096), upscale([image], tile=tile, overlap=overlap)
    assert differ(whole, tiled) <= 1


@pytest.mark.parametrize("size", [(64, 48), (61, 37), (100, 99), (131, 20)])
def test_tiles_of_an_image_have_one_shape_within_the_limit(size: tuple[int, int]) -> None:
    pieces = make_task(tile=64).prepare(make_request([to_file(photograph(*size))])).pieces
    (shape,) = {piece.arrays["luminance"].shape for piece in pieces}
    assert len({piece.key for piece in pieces}) == 1
    assert max(shape) <= 64
    assert {(piece.rows, piece.length) for piece in pieces} == {(1, 1)}


def test_tiles_of_images_of_like_sizes_have_one_shape() -> None:
    images = [to_file(photograph(*size)) for size in ((160, 136), (157, 133), (153, 131))]
    pieces = make_task(tile=256).prepare(make_request(images)).pieces
    assert {piece.key for piece in pieces} == {("luminance", 160, 176)}


@pytest.mark.parametrize("tile", [256, 384, 512])
def test_tiles_overlap_little(tile: int) -> None:
    pieces = make_task(tile=tile).prepare(make_request([photos()[0]])).pieces
    computed = sum(piece.arrays["luminance"].size for piece in pieces)
    assert computed < 1.3 * 640 * 480


def test_an_image_smaller_than_a_tile_is_not_filled_up() -> None:
    (piece,) = make_task().prepare(make_request([to_file(photograph(20, 30))])).pieces
    assert piece.key == ("luminance", 30 * 2 + 16, 20 * 2 + 16)


def test_tiles_of_several_images_are_kept_apart_in_a_batch(upscale: Upscale) -> None:
    images = [to_file(photograph(*size)) for size in ((64, 48), (20, 30), (61, 37))]
    together = upscale(images, tile=64)
    for image, answer in zip(images, together, strict=True):
        assert differ(upscale([image], is_batched=False, tile=64)[0], answer) <= 1


def test_warm_up_is_one_tile() -> None:
    (inputs,) = make_task(tile=96).warm_up_inputs()
    assert inputs["luminance"].shape == (1, 1, 96, 96)
    assert inputs["luminance"].dtype == np.float32


# Kinds of images


@pytest.mark.parametrize(
    ("mode", "kind", "answer_mode"),
    [
        ("RGB", "JPEG", "RGB"),
        ("L", "JPEG", "L"),
        ("CMYK", "JPEG", "RGB"),
        ("RGB", "PNG", "RGB"),
        ("L", "PNG", "L"),
        ("1", "PNG", "L"),
        ("P", "PNG", "RGB"),
        ("LA", "PNG", "LA"),
        ("RGBA", "PNG", "RGBA"),
    ],
)
def test_every_image_mode_is_answered(upscale: Upscale, mode: str, kind: str, answer_mode: str) -> None:
    data = to_file(photograph().convert(mode), kind)
    with Image.open(BytesIO(data)) as image:
        plain = to_file(image.convert(answer_mode))
    (answer,), (expected,) = upscale([data]), upscale([plain])
    assert answer.mode == answer_mode
    assert differ(answer, expected) == 0


def test_alpha_is_kept_bicubic(upscale: Upscale) -> None:
    given = photograph()
    alpha = Image.linear_gradient("L").resize(given.size)
    given.putalpha(alpha)
    (answer,) = upscale([to_file(given)])
    assert differ(answer.getchannel("A"), alpha.resize(answer.size, Image.Resampling.BICUBIC)) == 0


@pytest.mark.parametrize(("mode", "key", "answer_mode"), [("P", 7, "RGBA"), ("RGB", (1, 2, 3), "RGBA"), ("L", 9, "LA")])
def test_a_transparent_colour_becomes_alpha(upscale: Upscale, mode: str, key: object, answer_mode: str) -> None:
    (answer,) = upscale([to_file(photograph().convert(mode), transparency=key)])
    assert answer.mode == answer_mode


def test_a_palette_with_partial_transparency_becomes_alpha(upscale: Upscale) -> None:
    given = photograph().quantize(16)
    (answer,) = upscale([to_file(given, transparency=bytes(range(0, 256, 16)))])
    assert answer.mode == "RGBA"


def test_sixteen_bits_gray_keep_their_upper_eight(upscale: Upscale) -> None:
    gray = photograph().convert("L")
    deep = Image.fromarray((np.asarray(gray).astype(np.uint16) << 8) + 77)
    assert deep.mode == "I;16"
    (answer,), (expected,) = upscale([to_file(deep)]), upscale([to_file(gray)])
    assert differ(answer, expected) == 0


def test_sixteen_bits_colour_keep_their_upper_eight(upscale: Upscale) -> None:
    pixels = np.asarray(photograph(8, 6)).astype(">u2") * 257
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    deep = png(chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 6, 16, 2, 0, 0, 0)), chunk(b"IDAT", zlib.compress(rows)))
    (answer,), (expected,) = upscale([deep]), upscale([to_file(photograph(8, 6))])
    assert differ(answer, expected) <= 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(upscale: Upscale, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = to_file(photograph(40, 24), kind, exif=exif)
    with Image.open(BytesIO(turned)) as image:
        upright = to_file(ImageOps.exif_transpose(image))
    (answer,), (expected,) = upscale([turned]), upscale([upright])
    assert answer.size == ((80, 48) if orientation < 5 else (48, 80))
    assert differ(answer, expected) <= 3  # a turned image is rounded differently
    assert 0x0112 not in answer.getexif()


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0",
        b"Exif\0\0garbage",
    ],
)
def test_a_broken_exif_does_not_spoil_the_image(upscale: Upscale, exif: bytes) -> None:
    plain = to_file(photograph(), "JPEG")
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    (answer,), (expected,) = upscale([plain[:2] + segment + plain[2:]]), upscale([plain])
    assert differ(answer, expected) == 0


def test_a_colour_profile_is_kept_where_it_still_fits(upscale: Upscale) -> None:
    profile = b"\0" * 16 + b"RGB " + b"\0" * 108
    colour = upscale([to_file(photograph(), icc_profile=profile)])[0]
    gray = upscale([to_file(photograph().convert("L"), icc_profile=profile)])[0]
    assert colour.info["icc_profile"] == profile
    assert "icc_profile" not in gray.info


def test_progressive_files_are_read(upscale: Upscale) -> None:
    (answer,) = upscale([to_file(photograph(), "JPEG", progressive=True)])
    assert answer.size == (128, 96)


def test_a_jpeg_of_other_colours_is_read(upscale: Upscale) -> None:
    """Most JPEG files have YCbCr; this one has RGB."""
    data = to_file(photograph(), "JPEG", keep_rgb=True, quality=95)
    (answer,), (expected,) = upscale([data]), upscale([to_file(Image.open(BytesIO(data)))])
    assert differ(answer, expected) == 0


# Options of the answer


@pytest.mark.parametrize(("mode", "answer_mode"), [("RGB", "RGB"), ("L", "L")])
def test_jpeg_is_close_to_the_png(upscale: Upscale, mode: str, answer_mode: str) -> None:
    given = to_file(photograph().convert(mode))
    (expected,), (answer,) = upscale([given]), upscale([given], parameters={"format": "jpeg", "quality": 100}, tile=64)
    assert (answer.format, answer.mode) == ("JPEG", answer_mode)
    assert np.abs(np.asarray(answer, np.int16) - np.asarray(expected, np.int16)).mean() < 4
    (poor,) = upscale([given], parameters={"format": "jpeg", "quality": "20"})
    assert differ(poor, expected) > differ(answer, expected)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_webp_is_close_to_the_png(upscale: Upscale, mode: str) -> None:
    image = photograph().convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    (expected,), (answer,) = upscale([to_file(image)]), upscale([to_file(image)], parameters={"format": "webp"})
    assert answer.format == "WEBP"
    assert answer.mode == ("RGBA" if mode == "RGBA" else "RGB")
    found, wanted = (np.asarray(each.convert("RGB"), np.int16) for each in (answer, expected))
    assert np.abs(found - wanted).mean() < 8


def test_profiles_are_kept_in_every_format(upscale: Upscale) -> None:
    profile = b"\0" * 16 + b"RGB " + b"\0" * 108
    for kind in ("png", "jpeg", "webp"):
        (answer,) = upscale([to_file(photograph(), icc_profile=profile)], parameters={"format": kind})
        assert answer.info["icc_profile"] == profile


def test_transparent_image_cannot_be_a_jpeg(upscale: Upscale) -> None:
    image = photograph()
    image.putalpha(255)
    assert upscale([to_file(image)], parameters={"format": "jpeg"})[0].mode == "RGB"
    image.putalpha(254)
    with pytest.raises(InvalidRequest, match="request format png or webp"):
        upscale([to_file(image)], parameters={"format": "jpeg"})


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
@pytest.mark.parametrize(
    ("resolution", "size"), [("2x", (128, 96)), ("1x", (64, 48)), ("150p", (200, 150)), ("3.5x", (224, 168))]
)
def test_answer_has_the_requested_size(upscale: Upscale, kind: str, resolution: str, size: tuple[int, int]) -> None:
    (answer,) = upscale([PNG], parameters={"resolution": resolution, "format": kind}, tile=64)
    assert answer.size == size
    assert np.asarray(answer).std() > 10


def test_resolution_applies_after_the_orientation(upscale: Upscale) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (answer,) = upscale([to_file(photograph(64, 36), "JPEG", exif=exif)], parameters={"resolution": "160x160"})
    assert answer.size == (90, 160)


@pytest.mark.parametrize("mode", ["RGB", "LA", "L"])
def test_denoise_uses_the_second_network(upscale: Upscale, mode: str) -> None:
    """All planes go through the second network and none is enlarged. Both networks are the same here."""
    given = photograph().convert(mode)
    (answer,) = upscale([to_file(given)], parameters={"mode": "denoise"}, tile=48)
    assert (answer.size, answer.mode) == (given.size, mode)
    pieces = make_task(tile=512).prepare(make_request([to_file(given)], parameters={"mode": "denoise"})).pieces
    assert [list(piece.arrays) for piece in pieces] == [["second.luminance"]] * (3 if mode == "RGB" else 1)
    assert upscale([to_file(given)], parameters={"mode": "denoise", "resolution": "2x"})[0].size == (128, 96)


def test_larger_answers_have_a_larger_memory_estimate() -> None:
    task = make_task()
    asked: list[Parameters] = [{}, {"resolution": "8k"}, {"format": "webp"}]
    plain, larger, other = (task.weigh(make_request([PNG], parameters=parameters)) for parameters in asked)
    assert 0 < plain < other < larger
    assert task.weigh(make_request([PNG], parameters={"resolution": "nonsense"})) == 0


@pytest.mark.parametrize(
    ("parameters", "error", "says"),
    [
        ({"resolution": "32x32"}, InvalidRequest, r"64 × 48 pixels smaller \(32 × 24\): request a larger resolution"),
        ({"resolution": "0.5x"}, InvalidRequest, "request a larger resolution"),
        ({"resolution": "99x"}, RequestTooLarge, "gives at most 40000: request a smaller resolution"),
        ({"format": "webp", "resolution": "99x"}, RequestTooLarge, "gives at most 40000"),
        ({"format": "tiff"}, InvalidRequest, "png, jpeg or webp"),
        ({"mode": "paint"}, InvalidRequest, "upscale or denoise"),
    ],
)
def test_invalid_output_options_are_rejected(parameters: Parameters, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make_task(max_pixels=10_000).prepare(make_request([PNG], parameters=parameters))


def test_a_model_with_one_network_has_one_mode() -> None:
    with pytest.raises(InvalidRequest, match="no network for that"):
        UpscaleTask(UpscaleOptions(), ENGINE, 8).prepare(make_request([PNG], parameters={"mode": "denoise"}))


# Refusals


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + chunk(b"IEND", b"")


def bomb(width: int, height: int) -> bytes:
    return png(chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), chunk(b"IDAT", b""))


JPEG, PNG = to_file(photograph(), "JPEG"), to_file(photograph())
NO_PALETTE = png(
    chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 3, 0, 0, 0)), chunk(b"IDAT", zlib.compress(bytes(4 * (1 + 4))))
)
SIZE_IN_JPEG = JPEG.index(b"\xff\xc0") + 5


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a JPEG or PNG"),
        (b"hello", "not a JPEG or PNG"),
        (to_file(photograph(), "GIF"), "not a JPEG or PNG"),
        (to_file(photograph(), "BMP"), "not a JPEG or PNG"),
        (to_file(photograph(), "WEBP"), "not a JPEG or PNG"),
        (to_file(photograph(), "TIFF"), "not a JPEG or PNG"),
        (JPEG[: len(JPEG) // 2], "send the whole file"),
        (JPEG[:100], "send the whole file"),
        (JPEG[:2], "send the whole file"),
        (PNG[: len(PNG) // 2], "send the whole file"),
        (PNG[:20], "send the whole file"),
        (PNG[:8], "send the whole file"),
        (png(), "send the whole file"),
        (PNG[:60] + b"\0\0\0\0" + PNG[64:], "send the whole file"),
        (NO_PALETTE, "send the whole file"),
        (bomb(0, 10), "send the whole file"),
        (bomb(10, 0), "send the whole file"),
        (bomb(1, MAX_SIDE + 1), "no side may exceed"),
        (bomb(60_000, 60_000), "at most 25000000: shrink the image"),
        (bomb(10_000, 10_000), "at most 25000000: shrink the image"),
        (bomb(5_001, 5_000), "at most 25000000: shrink the image"),
        (JPEG[:SIZE_IN_JPEG] + b"\xff\xdc\xff\xdc" + JPEG[SIZE_IN_JPEG + 4 :], "at most 25000000: shrink the image"),
        (JPEG[:SIZE_IN_JPEG] + b"\0\0\0\x10" + JPEG[SIZE_IN_JPEG + 4 :], "send"),
        (to_file(photograph(), save_all=True, append_images=[photograph().rotate(90)]), "one frame"),
    ],
)
def test_unsupported_image_is_rejected(data: bytes, says: str) -> None:
    with pytest.raises(InvalidImage, match=says) as caught:
        make_task().prepare(make_request([PNG, data]))
    assert "input 'image' element 1" in caught.value.message


def scanned(count: int, between: bytes = b"") -> bytes:
    """Return a progressive JPEG that repeats its last scan."""
    whole = to_file(photograph(), "JPEG", progressive=True)
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:end] + (between + whole[last:end]) * (count - whole.count(b"\xff\xda")) + whole[end:]


SCAN = JPEG.index(b"\xff\xda")
# A second header with another size.
FRAME = JPEG[SIZE_IN_JPEG - 5 : SIZE_IN_JPEG] + b"\x13\x88" * 2 + JPEG[SIZE_IN_JPEG + 4 : SIZE_IN_JPEG + 14]
COMMENT = b"\xff\xfe\x00\x04\xff\xd9"  # with the marker that ends an image


@pytest.mark.parametrize("file", [scanned(32), scanned(32) + scanned(32), JPEG + bytes(range(256)) * 500])
def test_scans_after_the_end_of_an_image_are_ignored(upscale: Upscale, file: bytes) -> None:
    assert upscale([file])[0].size == (128, 96)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (scanned(33), "has 33 scans; at most 32 are allowed"),
        (scanned(33, COMMENT), "has 33 scans"),
        (scanned(33, b"\xff" * 9), "has 33 scans"),
        (scanned(1200), "more than 512 segments"),
        (b"\xff\xd8" + b"\xff" * 100_000 + JPEG[2:], "more than 512 segments before its pixels"),
        (b"\xff\xd8" + b"\xff\xd0" * 100_000 + JPEG[2:], "more than 512 segments before its pixels"),
        (b"\xff\xd8" + b"\xff\xfe\x00\x02" * 100_000 + JPEG[2:], "more than 512 segments before its pixels"),
        (PNG[:33] + chunk(b"tEXt", b"a") * 20_000 + PNG[33:], "more than 16384 chunks"),
        (JPEG[:2] + FRAME + JPEG[2:], "damaged"),
        (JPEG[:SCAN] + FRAME + JPEG[SCAN:], "damaged"),
    ],
)
def test_expensive_file_is_rejected(data: bytes, says: str) -> None:
    with pytest.raises(InvalidImage, match=says):
        make_task().prepare(make_request([data]))


def test_a_second_header_or_profile_of_a_png_is_not_read(upscale: Upscale) -> None:
    """A compressed profile of some kilobytes may have a megabyte of data."""
    profile = chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(1_000_000)))
    file = PNG[:33] + profile * 10_000 + bomb(5000, 5000)[8:33] + PNG[33:]
    assert upscale([file])[0].size == (128, 96)


@pytest.mark.parametrize("data", [PNG, JPEG, scanned(20)])
def test_an_images_memory_is_estimated_from_its_pixels(data: bytes) -> None:
    made = make_task()
    one, two = (made.weigh(make_request([data] * count)) for count in (1, 2))
    assert one >= 64 * 48 * (8 + 3 * 4)
    assert two == 2 * one
    assert made.weigh(make_request([bomb(60_000, 60_000)])) == 25_000_000 * 20  # larger images are not decoded


@pytest.mark.parametrize("data", [b"", PNG[:20], JPEG[:30], b"\xff\xd8" + b"\xff" * 100_000])
def test_unreadable_image_has_a_memory_estimate_of_zero(data: bytes) -> None:
    made = make_task()
    assert made.weigh(make_request([data])) == 0
    assert made.weigh(TaskRequest([], [])) == 0


def test_decompression_bomb_is_rejected_before_decoding() -> None:
    truncated = PNG[: len(PNG) // 2]
    with pytest.raises(InvalidImage, match="element 1: the image's header declares 5001 × 5000 pixels"):
        make_task().prepare(make_request([truncated, bomb(5_001, 5_000)]))


def test_images_of_a_cancelled_request_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request([PNG] * 3)
    decoded: list[ImageHeader] = []

    def decode(header: ImageHeader) -> DecodedImage:
        decoded.append(header)
        if len(decoded) == 2:
            request.inputs.clear()  # like a worker
        return decoding.decode(header)

    monkeypatch.setattr(image_files, "decode", decode)
    with pytest.raises(Cancelled):
        make_task().prepare(request)
    assert len(decoded) == 2


def test_total_pixels_of_a_request_are_limited() -> None:
    with pytest.raises(RequestTooLarge, match="the 2 images together have 6144 pixels"):
        make_task(max_pixels=6000).prepare(make_request([PNG, JPEG]))


@pytest.mark.parametrize("damaged_at", range(0, len(JPEG), 97))
@pytest.mark.parametrize("data", [JPEG, PNG], ids=["jpeg", "png"])
def test_damaged_byte_gives_an_answer_or_an_error(data: bytes, damaged_at: int) -> None:
    """A warning would fail this test, too."""
    damaged = bytearray(data)
    damaged[damaged_at % len(data)] ^= 0xFF
    with suppress(InvalidImage):
        make_task().prepare(make_request([bytes(damaged)]))


@pytest.mark.parametrize(
    ("inputs", "error", "says"),
    [
        ([], InvalidTensor, "got none"),
        ([Tensor("text", "BYTES", (1,), pack_bytes([PNG]))], InvalidTensor, "got 'text'"),
        ([Tensor("image", "UINT8", (4,), b"1234")], InvalidTensor, "got UINT8"),
        ([Tensor("image", "BYTES", (1, 2), pack_bytes([PNG, PNG]))], InvalidTensor, r"got BYTES \[1, 2\]"),
        ([Tensor("image", "BYTES", (), pack_bytes([PNG]))], InvalidTensor, r"got BYTES \[\]"),
        ([Tensor("image", "BYTES", (0,), b"")], InvalidRequest, "no rows"),
        ([Tensor("image", "BYTES", (2,), pack_bytes([PNG]))], InvalidTensor, "4-byte"),
        ([Tensor("image", "BYTES", (9,), pack_bytes([PNG] * 9))], RequestTooLarge, "send at most 8 per request"),
    ],
)
def test_wrong_tensors_are_rejected(inputs: list[Tensor], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make_task().prepare(TaskRequest(inputs, []))


def test_unknown_output_is_rejected() -> None:
    request = make_request([PNG])
    request.outputs = ["picture"]
    with pytest.raises(InvalidTensor, match="unknown output 'picture'"):
        make_task().prepare(request)


def test_a_column_of_images_is_answered_by_a_column() -> None:
    task, request = make_task(), make_request([PNG, PNG], (2, 1))
    prepared = task.prepare(request)
    results = [(piece.arrays["luminance"],) for piece in prepared.pieces]
    (answer,) = task.finish(request, prepared, results)
    assert (answer.name, answer.datatype, answer.shape) == ("image", "BYTES", (2, 1))


@pytest.mark.parametrize(
    "inputs",
    [
        (),
        (TensorSpec("a", "FP32", PLANE), TensorSpec("b", "FP32", PLANE)),
        (TensorSpec("a", "UINT8", PLANE),),
        (TensorSpec("a", "FP32", (-1, 3, -1, -1)),),
        (TensorSpec("a", "FP32", (-1, 1, 256, 256)),),
        (TensorSpec("a", "FP32", (-1, 1)),),
    ],
)
def test_network_that_does_not_take_planes_is_rejected(inputs: tuple[TensorSpec, ...]) -> None:
    engine = Signature(inputs, (TensorSpec("out", "FP32", PLANE),), "onnx", "fp32")
    with pytest.raises(ConfigError, match="the upscale task needs"):
        UpscaleTask(UpscaleOptions(), engine, 8)
