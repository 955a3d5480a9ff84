"""Finds the models of a watched repository that must be deployed again. Pure: no I/O."""

from collections.abc import Mapping

STEADY_S = 3.0  # a folder that has not changed for this time is not being copied any more
# The files of each version, and model.yaml under the key "model.yaml": path, size and time of last change per file.
FolderState = Mapping[str, tuple[tuple[str, int, int], ...]]
SETTINGS = "model.yaml"


class FolderChanges:
    """Compares the state of each model's folder with the state at the last deployment."""

    def __init__(self, deployed: Mapping[str, FolderState]) -> None:
        self._deployed = dict(deployed)
        self._changed: dict[str, tuple[FolderState | None, float]] = {}  # by model: the new state, and since when

    def take_steady_models(self, folder_states: Mapping[str, FolderState], now: float) -> list[str]:
        """Return the new, changed and removed models whose folders have not changed again for `STEADY_S`."""
        steady = []
        for model in sorted(self._deployed.keys() | folder_states.keys()):
            state = folder_states.get(model)
            if state == self._deployed.get(model):
                self._changed.pop(model, None)
                continue
            seen, since = self._changed.get(model, (None, now))
            if model not in self._changed or seen != state:
                self._changed[model] = (state, now)
            elif now - since >= STEADY_S:
                steady.append(model)
        return steady

    def find_unchanged_versions(self, model: str, folder_states: Mapping[str, FolderState]) -> set[str]:
        """Return the versions whose files and settings have not changed since the model was deployed."""
        before, after = self._deployed.get(model, {}), folder_states.get(model, {})
        if before.get(SETTINGS) != after.get(SETTINGS):
            return set()
        return {version for version in before.keys() & after.keys() - {SETTINGS} if before[version] == after[version]}

    def set_deployed(self, model: str, folder_states: Mapping[str, FolderState]) -> None:
        """Record the state of the folder from which the model was deployed."""
        self._changed.pop(model, None)
        if model in folder_states:
            self._deployed[model] = folder_states[model]
        else:
            self._deployed.pop(model, None)
