"""The states of models that `penstock model list` shows."""

from typing import Any

from penstock.features.admin.model_commands import summarize


def block(model: str, version: str, state: str, reason: str = "") -> dict[str, Any]:
    return {"model": model, "version": version, "state": state, "reason": reason}


def test_a_model_has_the_state_of_the_version_that_serves_and_the_problems_of_the_others() -> None:
    blocks = [
        block("a", "10", "failed", "it is cut off"),
        block("a", "9", "ready"),
        block("b", "1", "unloaded", "unloaded"),
        block("c", "1", "dormant"),
        block("d", "1", "failed", "no weights"),
        block("e", "1", "ready", "still serving, but reloading failed: x"),
    ]
    assert summarize(blocks) == {
        "a": ("ready", "version 10 failed: it is cut off"),
        "b": ("unloaded", ""),
        "c": ("loads on first request", ""),
        "d": ("failed", "version 1 failed: no weights"),
        "e": ("ready", "version 1 still serving, but reloading failed: x"),
    }
