"""Ships in the client's wheel what the server's leaves out."""

import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ClientFiles(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return  # an editable one finds them where they are
        repository = Path(self.root).parent
        project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
        for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]:
            build_data["force_include"][f"{repository}{path}"] = path.removeprefix("/src/")
