"""Collects photographs from Debian packages and cuts them into the pairs that train_srcnn.py learns from.

    python training/srcnn_data.py --work work/photos --out training/data/srcnn.npz

Needs apt-get and dpkg (any Debian or Ubuntu), numpy and Pillow. training/SOURCES.md names every
photograph with its author and licence. The file holds uint8 luminance:

    upscaled, original            [n, 96, 96]    what the network gets, and what it should answer
    held_upscaled, held_original  [n, 256, 256]  from photographs that training never sees
    held_names                    [n]
"""

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.uint8]
Pair = tuple[Plane, Plane]

# Most wallpapers are renderings and drawings, which have none of a photograph's statistics: so
# photographs are named one by one, by the end of their path.
PHOTOGRAPHS = {
    "lomiri-wallpapers-16.04": [
        "Bridge_by_Sander_Klootwijk.jpg",
        "Dragonfly_by_Bolly.jpg",
        "Picture_0B_by_freespace.jpg",
        "Picture_1A_by_freespace.jpg",
        "Wine_by_Jakkub_Mede.jpg",
        "aitzgorri_by_Aitzol_Berasategi.jpg",
        "free_by_Peter_Nerlich.jpg",
        "friends_by_Aitzol_Berasategi.jpg",
        "greentock_by_Peter_Nerlich.jpg",
        "life_by_Aitzol_Berasategi.jpg",
        "picosdeeuropa_by_Aitzol_Berasategi.jpg",
        "seeding_by_Clements_Engelhardt.jpg",
        "sunset_by_Aitzol_Berasategi.jpg",
    ],
    "lomiri-wallpapers-20.04": ["Kleiber_by_Lukas_Baubkus.jpg"],
    "mate-backgrounds": [
        "nature/Aqua.jpg",
        "nature/Blinds.jpg",
        "nature/Dune.jpg",
        "nature/FreshFlower.jpg",
        "nature/Garden.jpg",
        "nature/GreenMeadow.jpg",
        "nature/LadyBird.jpg",
        "nature/RainDrops.jpg",
        "nature/Storm.jpg",
        "nature/TwoWings.jpg",
        "nature/Wood.jpg",
        "nature/YellowFlower.jpg",
    ],
    "palapeli-data": [
        "collection/castle-maintenon.jpg",
        "collection/cincinnati-bridge.jpg",
        "collection/citrus-fruits.jpg",
        "collection/european-honey-bee.jpg",
        "collection/panther-chameleon-female.jpg",
    ],
    "plasma-workspace-wallpapers": [
        "BytheWater/contents/images/2560x1600.jpg",
        "ColdRipple/contents/images/2560x1600.jpg",
        "ColorfulCups/contents/images/2560x1600.jpg",
        "EveningGlow/contents/images/2560x1600.jpg",
        "FallenLeaf/contents/images/2560x1600.jpg",
        "Grey/contents/images/2560x1600.jpg",
        "Kite/contents/images/2560x1600.jpg",
        "OneStandsOut/contents/images/2560x1600.jpg",
        "Path/contents/images/2560x1600.jpg",
    ],
}
HELD_OUT = ("friends_by", "life_by", "LadyBird", "ColorfulCups", "cincinnati-bridge")
LONG_SIDES = (1400, 1000, 700, 480)  # photographs are soft at full size: shrunk, every pixel counts
PATCH = 96
HELD_PATCH = 256
MIN_DETAIL = 1.2  # mean |original - upscaled| in 1/255: a blurred background teaches nothing


def fetch(package: str, work: Path) -> Path:
    """Return the folder with the package's unpacked files."""
    folder = work / package
    if not folder.is_dir():
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", package], cwd=work, check=True)
        (archive,) = work.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", archive, folder], check=True)
    return folder


def find_photographs(work: Path) -> Iterator[Path]:
    for package, endings in PHOTOGRAPHS.items():
        folder = fetch(package, work)
        for ending in endings:
            (path,) = folder.glob(f"usr/share/**/{ending}")
            yield path


def read_luminance(path: Path, long_side: int) -> Image.Image | None:
    """Return the photograph's luminance at that size with even sides, or None if it would not shrink."""
    with Image.open(path) as image:
        ratio = long_side / max(image.size)
        if ratio > 0.85:
            return None
        width, height = (round(side * ratio) // 2 * 2 for side in image.size)
        return image.convert("YCbCr").getchannel("Y").resize((width, height), Image.Resampling.LANCZOS)


def degrade(original: Image.Image) -> Pair:
    """Return the halved original enlarged by bicubic interpolation, and the original."""
    width, height = original.size
    low = original.resize((width // 2, height // 2), Image.Resampling.BICUBIC)
    upscaled = low.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(upscaled), np.asarray(original)


def cut(pair: Pair, side: int) -> Iterator[Pair]:
    upscaled, original = pair
    height, width = original.shape
    for top in range(0, height - side + 1, side):
        for left in range(0, width - side + 1, side):
            window = np.s_[top : top + side, left : left + side]
            yield upscaled[window], original[window]


def detail(pair: Pair) -> float:
    return float(np.abs(pair[0].astype(np.int16) - pair[1]).mean())


def label(path: Path) -> str:
    return path.stem if path.parent.name != "images" else path.parents[2].name


def collect(work: Path) -> dict[str, NDArray[np.generic]]:
    train: list[Pair] = []
    held: list[tuple[str, Pair]] = []
    for path in find_photographs(work):
        pairs = [degrade(plane) for side in LONG_SIDES if (plane := read_luminance(path, side))]
        if any(name in str(path) for name in HELD_OUT):
            crops = sorted((crop for pair in pairs for crop in cut(pair, HELD_PATCH)), key=detail)
            held += [(label(path), crop) for crop in crops[len(crops) // 2 :][:4]]
        else:
            crops = [crop for pair in pairs for crop in cut(pair, PATCH) if detail(crop) >= MIN_DETAIL]
            train += crops
        print(f"{label(path)}: {len(crops)} crops")
    return {
        "upscaled": np.stack([pair[0] for pair in train]),
        "original": np.stack([pair[1] for pair in train]),
        "held_upscaled": np.stack([pair[0] for _, pair in held]),
        "held_original": np.stack([pair[1] for _, pair in held]),
        "held_names": np.array([name for name, _ in held]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the packages, 200 MB")
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    options = parser.parse_args()
    arrays = collect(options.work)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, **arrays)
    size_mb = options.out.stat().st_size / 1e6
    print(f"{len(arrays['original'])} training pairs, {len(arrays['held_names'])} held out, {size_mb:.1f} MB")


if __name__ == "__main__":
    main()
