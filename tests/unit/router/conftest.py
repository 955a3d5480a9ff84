"""A dispatcher for the tests of its messages to workers."""

from collections.abc import AsyncIterator
from typing import ClassVar

import pytest

from penstock.core.config import DataPlane
from tests.unit.router.peers import Bed


class PatientPlane(DataPlane):
    beat_s: ClassVar[float] = 0.05
    silence_s: ClassVar[float] = 600.0


@pytest.fixture
def settings() -> DataPlane:
    """No worker is considered dead here."""
    return PatientPlane()


@pytest.fixture
async def bed(tmp_path_factory: pytest.TempPathFactory, settings: DataPlane) -> AsyncIterator[Bed]:
    made = Bed(tmp_path_factory.mktemp("d"), settings)
    yield made
    await made.close()
