"""The table of equivalent changes that `scripts/mutate` skips."""

import pytest

from tests.mutation import EQUIVALENT, MODULES, ROOT


@pytest.mark.parametrize("name", EQUIVALENT)
def test_lines_with_equivalent_changes_exist(name: str) -> None:
    source = (ROOT / "src/penstock" / MODULES[name][0]).read_text(encoding="utf-8")
    lines = {line.strip() for line in source.splitlines()}
    assert [line for line, _, _ in EQUIVALENT[name] if line not in lines] == []
