"""A dispatcher for the tests of what it says to workers."""

from collections.abc import AsyncIterator

import pytest

from penstock.core.config import DataPlane
from tests.unit.router.peers import Bed


@pytest.fixture
def settings() -> DataPlane:
    """Nobody is taken for dead here."""
    return DataPlane(beat_s=0.05, silence_s=600.0)


@pytest.fixture
async def bed(tmp_path_factory: pytest.TempPathFactory, settings: DataPlane) -> AsyncIterator[Bed]:
    made = Bed(tmp_path_factory.mktemp("d"), settings)
    yield made
    await made.close()
