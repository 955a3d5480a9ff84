"""The photographs that benchmarks send: small JPEG files, listed in data/PHOTOS.md."""

from importlib.resources import files
from pathlib import Path

PHOTOS = Path(str(files("penstock.models.samples"))) / "data" / "photos"


def photos() -> list[bytes]:
    """Return seven JPEG files of 320 × 240 pixels, in a fixed order."""
    return [file.read_bytes() for file in sorted(PHOTOS.glob("*.jpg"))]


def find_photo() -> str:
    """Return a photograph's path for a shell command; the path is relative if the file is below the current folder."""
    photo = PHOTOS / "dogs.jpg"
    return str(photo.relative_to(Path.cwd()) if photo.is_relative_to(Path.cwd()) else photo)
