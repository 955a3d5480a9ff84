"""Photographs to enlarge to 1080p, made of the small shipped ones side by side."""

from io import BytesIO

from PIL import Image

from penstock.models.samples.photos import photos

WIDTH, HEIGHT = 960, 540  # of requests; answers are twice as wide and high
QUALITY = 90


def make_mosaics() -> list[bytes]:
    """Return as many JPEG files as there are photographs; each starts with a different photograph."""
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
