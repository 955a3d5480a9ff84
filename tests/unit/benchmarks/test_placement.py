"""The benchmark of placements: its repository has every model in every place."""

from benchmarks.suite.placement import COPY, _build_repository
from penstock.core.config import Limits
from penstock.models.folder import list_model_folders, read_model_folder
from penstock.models.loading import load_block
from tests.servers import ROOT

PLACES = ("inline", "pool")


def test_the_repository_has_every_model_in_every_place(tmp_path):
    repository = _build_repository(ROOT / "models", tmp_path, PLACES)
    folders = {folder.name: read_model_folder(folder) for folder in list_model_folders(repository)}
    assert set(folders) == {f"{model}-{placement}" for model in ("srcnn", COPY, "minilm") for placement in PLACES}
    assert all(name.endswith(f"-{folder.settings.placement}") for name, folder in folders.items())
    loaded = load_block("blk", repository / f"{COPY}-pool", "1", Limits())
    assert [spec.name for spec in loaded.description.outputs] == ["image"]
    loaded.engine.close()
