"""Enlarges a photograph twice in the handlers of all peers. Needs numpy, Pillow and an engine.

It does what Penstock's upscale task does for a small colour JPEG: bicubic for all of it, the network for the luminance.
"""

import io
import os
import zlib
from pathlib import Path

OVERLAP = 8


class Upscaler:
    def __init__(self, folder: str | os.PathLike[str], engine: str = "onnx", threads: int = 1) -> None:
        from embedder import onnx_run, openvino_run

        self._run = {"onnx": onnx_run, "openvino": openvino_run}[engine](Path(folder) / "model.onnx", threads)

    def upscale(self, jpeg: bytes) -> bytes:
        """Return a PNG."""
        import numpy as np
        from PIL import Image

        image = Image.open(io.BytesIO(jpeg)).convert("RGB")
        size = (image.width * 2, image.height * 2)
        planes = [plane.resize(size, Image.Resampling.BICUBIC) for plane in image.convert("YCbCr").split()]
        padded = np.pad(np.asarray(planes[0]), OVERLAP, mode="edge")
        sharp = self._run({"luminance": np.multiply(padded, np.float32(1 / 255), dtype=np.float32)[None, None]})[0, 0]
        rounded = np.clip(np.rint(sharp * np.float32(255)), 0, 255).astype(np.uint8)[OVERLAP:-OVERLAP, OVERLAP:-OVERLAP]
        file = io.BytesIO()
        Image.merge("YCbCr", (Image.fromarray(np.ascontiguousarray(rounded)), *planes[1:])).convert("RGB").save(
            file, "PNG", compress_level=1, compress_type=zlib.Z_RLE
        )
        return file.getvalue()
