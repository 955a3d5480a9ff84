"""Finds weights in an installed package without importing the package."""

from importlib import metadata, util
from pathlib import Path

from penstock.core.errors import ConfigError


def find_packaged(package: str, inside: str) -> Path:
    """Return a file or folder of the package; raise ConfigError if the package is not installed or lacks the file."""
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
