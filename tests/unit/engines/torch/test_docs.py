"""The models in docs/torch-models.md can be served."""

import re
from pathlib import Path

import numpy as np
import pytest

from penstock.core.config import Limits
from penstock.models.loading import load_block

DOCS = Path(__file__).parents[4] / "docs" / "torch-models.md"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["scale", "join"])
def test_examples_without_downloads_are_served_as_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DOCS.read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if f"models/{name}/" in block]
    (settings,) = re.findall(rf"```yaml\n# models/{name}/model\.yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "models" / name / "1").mkdir(parents=True)
    (tmp_path / "models" / name / "model.yaml").write_text(settings)
    (tmp_path / "example.py").write_text(code)  # a file, because TorchScript reads a module's source
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(tmp_path / "example.py"), "exec"), {"__name__": "example"})
    loaded = load_block("blk", tmp_path / "models" / name, "1", Limits())
    assert loaded.description.max_batch_size > 1
    inputs = {spec.name: np.ones((3, spec.shape[1]), np.float32) for spec in loaded.description.inputs}
    task, engine = loaded.batching
    found = engine.infer(0, inputs, task.engine_outputs)
    assert [array.shape[0] for array in found] == [3, 3]
    expected = {"scale": ["y", "total"], "join": ["joined", "total"]}[name]
    assert [spec.name for spec in loaded.description.outputs] == expected
