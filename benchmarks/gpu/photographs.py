"""Photographs to be made 1080p: the small ones that ship, side by side."""

from io import BytesIO

from PIL import Image

from penstock.models.samples.photos import photos

WIDTH, HEIGHT = 960, 540  # of what is sent; the answer has twice of each
QUALITY = 90


def mosaics() -> list[bytes]:
    """As many JPEG files as there are photographs, each beginning with another of them."""
    small = [Image.open(BytesIO(file)).convert("RGB") for file in photos()]
    found = []
    for first in range(len(small)):
        mosaic = Image.new("RGB", (WIDTH, HEIGHT))
        for place in range(9):
            photo = small[(first + place) % len(small)]
            mosaic.paste(photo, (place % 3 * photo.width, place // 3 * photo.height))
        file = BytesIO()
        mosaic.save(file, "JPEG", quality=QUALITY)
        found.append(file.getvalue())
    return found
