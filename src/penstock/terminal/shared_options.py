"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import InvalidRequest

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Timeout of each request in seconds.")]
ImageFormat = Annotated[
    str | None,
    typer.Option("--format", help="Format of the results: png, jpeg or webp. [default: by OUT's name, otherwise png]"),
]
ImageQuality = Annotated[
    int | None, typer.Option("--quality", help="Quality of jpeg and webp, 1 to 100. [default: 90]")
]
ImageResolution = Annotated[
    str | None,
    typer.Option(
        "--resolution",
        help="Size of the result: a factor (2x), a height (1080p, 4k) or a size (1920x1080). "
        "[default: the model's factor]",
    ),
]
ImageMode = Annotated[str | None, typer.Option("--mode", help="What to do: upscale or denoise. [default: upscale]")]


def read_model_name(name_or_path: str | None) -> str | None:
    """Return a model's name; `name_or_path` is the name or the path of the model's folder."""
    if name_or_path is None or ("/" not in name_or_path and name_or_path not in (".", "..")):
        return name_or_path
    name = Path(name_or_path).resolve().name
    if not name or not (Path(name_or_path) / "model.yaml").is_file():
        raise InvalidRequest(
            f"{name_or_path}: no folder with a model.yaml; give a model's name, or the path of its folder"
        )
    return name


def read_block_name(name_or_path: str | None) -> str | None:
    """Return a block's name; a path before `:VERSION` is replaced by the name of the model in that folder."""
    path, colon, version = (name_or_path or "").partition(":")
    return f"{read_model_name(path)}{colon}{version}" if "/" in path else name_or_path
