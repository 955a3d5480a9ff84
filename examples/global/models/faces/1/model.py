"""Faces in the image files of a packet, as boxes in pixels. `bounding_boxes` in the data limit the search to regions."""

import io

import numpy as np
from penstock.core.errors import InvalidImage, InvalidRequest
from PIL import Image, UnidentifiedImageError
from skimage import data
from skimage.feature import Cascade

SMALLEST = 24  # pixels: the size of the faces that the cascade was trained with
MAX_PIXELS = 4_000_000  # larger images are scaled down
MAX_FILE_PIXELS = 50_000_000
KEYS = ("x", "y", "width", "height")


class Model:
    def __init__(self):
        self.cascade = Cascade(data.lbp_frontal_face_cascade_filename())

    def infer(self, packet, context):
        regions = read_regions(packet)
        found = []
        for index, file in enumerate(packet.files):
            image = open_image(index, file.data)
            boxes = [box for region in regions.get(index, [None]) for box in self.detect(image, region)]
            name = file.metadata.get("file_name")
            width, height = image.size
            found.append({"file_index": index, "file_name": name, "width": width, "height": height, "boxes": boxes})
        return {"task": "object_detection", "detections": found}

    def detect(self, image, region):
        """Return the boxes of faces in a region, in the coordinates of the whole image."""
        x, y, width, height = region or (0, 0, *image.size)
        part = image.crop((x, y, min(x + width, image.width), min(y + height, image.height)))
        scale = min(1.0, (MAX_PIXELS / max(1, part.width * part.height)) ** 0.5)
        if scale < 1.0:
            part = part.resize((max(1, int(part.width * scale)), max(1, int(part.height * scale))))
        side = min(part.size)
        if side <= SMALLEST:
            return []
        faces = self.cascade.detect_multi_scale(
            img=np.asarray(part),
            scale_factor=1.2,
            step_ratio=1,
            min_size=(max(SMALLEST, side // 12),) * 2,
            max_size=(side, side),
        )
        return [
            {
                "label": "face",
                "x": x + round(face["c"] / scale),
                "y": y + round(face["r"] / scale),
                "width": round(face["width"] / scale),
                "height": round(face["height"] / scale),
            }
            for face in faces
        ]


def open_image(index, content):
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_FILE_PIXELS:
                raise InvalidImage(f"file {index} has {image.width} x {image.height} pixels; send at most 50 million")
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise InvalidImage(f"file {index} is not an image that can be read: {error}") from error


def read_regions(packet):
    """Return the regions to search, as x, y, width and height, by the index of their file."""
    try:
        asked = packet.json() if packet.data else {}
    except ValueError as error:
        raise InvalidRequest(f"'data' is not JSON: {error}") from error
    boxes = asked.get("bounding_boxes", []) if isinstance(asked, dict) else None
    if not isinstance(boxes, list):
        raise InvalidRequest("'data' must be an object; 'bounding_boxes' must be a list")
    regions = {}
    for box in boxes:
        values = [box.get(key) for key in ("file_index", *KEYS)] if isinstance(box, dict) else []
        if not values or not all(type(value) is int and 0 <= value < 2**31 for value in values):
            raise InvalidRequest(f"a bounding box needs file_index, {', '.join(KEYS)}, whole numbers from 0; got {box!r:.80}")
        if values[0] >= len(packet.files):
            raise InvalidRequest(f"a bounding box has file_index {values[0]}, but the packet has {len(packet.files)} files")
        regions.setdefault(values[0], []).append(values[1:])
    return regions
