"""The photographs that benchmarks send: small real JPEGs, listed in data/PHOTOS.md."""

from importlib.resources import files


def photos() -> list[bytes]:
    """Seven JPEG files of 320 × 240 pixels, always in the same order."""
    folder = files("penstock.models.samples") / "data" / "photos"
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".jpg")), key=lambda entry: entry.name)
    return [entry.read_bytes() for entry in found]
