"""`penstock model push`, `pull`, `list --registry`, `alias` and `delete` against a registry."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import Conflict, InvalidRequest, PenstockError
from tests.registry_bed import RegistryBed, registry_bed
from tests.servers import write_factor


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[RegistryBed]:
    async with registry_bed(tmp_path / "data") as bed:
        yield bed


class Terminal:
    def __init__(self, bed: RegistryBed) -> None:
        self._flags = ("--server", bed.address, "--json")

    async def run(self, *words: str) -> Any:
        result = await asyncio.to_thread(CliRunner().invoke, app, ["model", *words, *self._flags])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
def terminal(bed: RegistryBed) -> Terminal:
    return Terminal(bed)


async def test_a_model_is_checked_pushed_listed_aliased_pulled_and_deleted(terminal: Terminal, tmp_path: Path) -> None:
    write_factor(tmp_path / "models", "double", 2.0, "tags: [arithmetic]\n")
    folder = tmp_path / "models" / "double"
    made = await terminal.run("push", str(folder), "--tag", "mine")
    assert (made["model"], made["version"], made["aliases"]) == ("double", "1", ["latest"])
    facts = made["metadata"]
    assert facts["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    assert facts["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, -1]}]
    assert (facts["batchable"], facts["shards"], facts["tags"]) == (True, 1, ["arithmetic", "mine"])
    assert await terminal.run("push", str(folder)) == made  # already uploaded
    await terminal.run("alias", "double:1", "stable")
    (listed,) = await terminal.run("list", "--registry")
    assert listed["aliases"] == ["latest", "stable"]
    pulled = await terminal.run("pull", "double@stable", str(tmp_path / "pulled" / "double"))
    assert pulled["digest"] == made["digest"]
    for file in ("model.yaml", "1/model.onnx"):
        assert (tmp_path / "pulled" / "double" / file).read_bytes() == (folder / file).read_bytes()
    assert [child.name for child in (tmp_path / "pulled").iterdir()] == ["double"]
    await terminal.run("pull", "double:1", str(tmp_path / "pulled" / "double"))  # already uploaded
    with pytest.raises(Conflict, match="stable"):
        await terminal.run("delete", "double:1")
    await terminal.run("alias", "double", "stable")
    await terminal.run("delete", "double:1")
    assert await terminal.run("list", "--registry") == []


async def test_pulling_overwrites_no_existing_files(terminal: Terminal, tmp_path: Path) -> None:
    write_factor(tmp_path / "models", "double", 2.0)
    await terminal.run("push", str(tmp_path / "models" / "double"), "--no-check")
    target = tmp_path / "target"
    target.mkdir()
    (target / "model.yaml").write_text("task: embed\n")
    with pytest.raises(InvalidRequest, match="exists with other content"):
        await terminal.run("pull", "double", str(target))
    (target / "model.yaml").unlink()
    (target / "1").symlink_to(tmp_path / "models")
    with pytest.raises(InvalidRequest, match="exists with other files"):
        await terminal.run("pull", "double", str(target))
    assert not (target / "model.yaml").exists()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="is a file"):
        await terminal.run("pull", "double", str(tmp_path / "file"))


async def test_a_model_that_does_not_load_is_not_pushed(bed: RegistryBed, terminal: Terminal, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    (folder / "1").mkdir(parents=True)
    (folder / "model.yaml").write_text("task: tensor\n")
    (folder / "1" / "model.onnx").write_bytes(b"this is no network")
    with pytest.raises(PenstockError, match="--no-check"):
        await terminal.run("push", str(folder))
    assert bed.staged() == []
    (folder / "1" / "secret.txt").symlink_to("/etc/hostname")
    with pytest.raises(InvalidRequest, match=r"secret\.txt is a link to a place outside"):
        await terminal.run("push", str(folder), "--no-check")
    outside = (folder / "1").rename(tmp_path / "outside")
    (folder / "1").symlink_to(outside)
    with pytest.raises(InvalidRequest, match=f"{folder}/1 is a link to a place outside"):
        await terminal.run("push", str(folder), "--no-check")
    with pytest.raises(PenstockError, match="is a link to a place outside"):
        await terminal.run("push", str(folder))
    assert bed.staged() == []


async def test_an_address_without_a_manager_is_reported(tmp_path: Path) -> None:
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["model", "pull", "x", str(tmp_path), "--server", "127.0.0.1:1"]
    )
    assert isinstance(result.exception, PenstockError)
    assert "no Penstock manager answers at 127.0.0.1:1" in result.exception.message


async def test_pushing_to_an_unreachable_address_fails_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.registry.REACH_S", 0.0)
    write_factor(tmp_path, "double", 2.0)
    words = ["model", "push", str(tmp_path / "double"), "--no-check", "--server", "127.0.0.1:1"]
    result = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert isinstance(result.exception, PenstockError)
    assert "no Penstock manager answers" in result.exception.message
