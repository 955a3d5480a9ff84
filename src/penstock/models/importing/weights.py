"""Where the weights of a model to import are: in a folder of the user's, or in a package."""

from pathlib import Path

from penstock.core.errors import ConfigError

PACKAGED = ("minilm",)  # what --from knows


def find_weights(name: str, source: Path | None, package: str | None) -> Path:
    """The folder that --source or --from names, or the package of the model's own name."""
    if source is not None:
        if package is not None:
            raise ConfigError("--source and --from both say where the weights are: leave one out")
        if not source.is_dir():
            raise ConfigError(
                f"{source}: no such folder; it must hold model.safetensors, config.json and tokenizer.json"
            )
        return source
    package = package or (name if name in PACKAGED else None)
    if package is None:
        raise ConfigError(
            f"say where the weights are: --source FOLDER, or --from {'|'.join(PACKAGED)} (which comes in a package)"
        )
    if package not in PACKAGED:
        raise ConfigError(f"--from {package}: the packages that bring weights are {', '.join(PACKAGED)}")
    from penstock.engines.onnx.bert_file import find_minilm_weights

    return find_minilm_weights()
