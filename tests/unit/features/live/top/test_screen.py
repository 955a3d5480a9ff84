"""The screen of `penstock top`: within 80 by 24, whatever the server holds."""

import pytest
from rich.console import Console

from penstock.core.cluster.devices import DeviceStatus
from penstock.features.live.figures import compare
from penstock.features.live.live_view import BlockInfo, ServerInfo, WorkerInfo
from penstock.features.live.top.screen import History, draw_screen
from penstock.telemetry.snapshot import ProcessFigures, Series

TEXT = ("generation_steps", "generated_tokens", "prompt_tokens", "preemptions")


def drawn(
    blocks: int, workers: int, width: int, height: int, trouble: str = "", generates: bool = False, devices: int = 0
) -> list[str]:
    standing = ServerInfo(
        "penstock",
        "9",
        ready=True,
        draining=False,
        blocks=[
            BlockInfo(f"blk-{i}", f"[red]a-model-with-a-long-name-{i}", "12", "ready", "", 32) for i in range(blocks)
        ],
        workers=[
            WorkerInfo(f"worker-{i}", 7, 3, 10**9, [f"blk-{j}" for j in range(blocks)], [], "") for i in range(workers)
        ],
        devices=[
            DeviceStatus(f"GPU-{i}", "NVIDIA [b]H200", 140 * 2**30, 2**30, 0.5, ["worker-0"], {"blk-0": 2**29})
            for i in range(devices)
        ],
    )
    last = f"[red]a-model-with-a-long-name-{blocks - 1}"
    labels = frozenset({"code": "a_code_of_some_length", "model": last, "version": "12"}.items())
    of_model = frozenset({"model": last, "version": "12"}.items())
    text = {Series(f"penstock_{name}_total", of_model): 98765.0 for name in TEXT} if generates else {}
    counts = {"gateway-0": ProcessFigures({Series("penstock_requests_total", labels): 123456.0, **text})}
    history = History()
    history.append(compare({}, counts, 1.0, 1000.0, standing))
    console = Console(width=width, height=height, record=True, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(draw_screen("http://127.0.0.1:8080", history, width, height, trouble))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 140])
def test_gpus_have_rows_if_there_are_any(width: int) -> None:
    for generates in (False, True):
        lines = drawn(1, 1, width, 24, generates=generates, devices=2)
        assert len(lines) <= 24
        assert max(map(len, lines)) <= width
        (brief,) = (line for line in lines if line.startswith("GPUs"))
        assert brief.split()[1:7] == ["50%", "1.0", "GiB", "of", "140.0", "GiB"]
    lines = drawn(1, 1, width, 30, devices=2)
    rows = [line.split() for line in lines if line.startswith("NVIDIA [b]H200")]
    assert [row[2:8] for row in rows] == [["1.0", "GiB", "140.0", "GiB", "50%", "1"]] * 2
    assert not [line for line in drawn(1, 1, width, 24) if line.startswith("GPU")]


@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize(("blocks", "workers"), [(0, 0), (1, 1), (3, 2), (40, 1), (2, 20), (40, 20)])
def test_the_screen_fits_the_terminal(blocks: int, workers: int, width: int, generates: bool) -> None:
    lines = drawn(blocks, workers, width, 24, generates=generates)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    (head,) = (line.split() for line in lines if line.startswith(("worker  ", "worker (")))
    assert {"state", "memory", "busy", "idle", "work", "batch/s", "rows/s", "blocks"} <= set(head)
    assert lines[-1] == "q quits"


def test_the_busiest_blocks_are_shown_with_the_number_of_hidden_ones() -> None:
    lines = drawn(40, 1, 140, 24)
    shown = [line for line in lines if line.startswith("[red]a-model")]
    assert shown[0].startswith("[red]a-model-with-a-long-name-39:12")
    assert f"model (+{40 - len(shown)})" in "\n".join(lines)


def test_names_and_counters_are_not_shortened() -> None:
    for blocks in (1, 40):
        text = "\n".join(drawn(blocks, 2, 80, 24))
        assert "failures 0" in text
        assert "…" not in "\n".join(line for line in text.splitlines() if line.startswith(("worker", "trouble")))


def test_a_taller_terminal_shows_all_blocks() -> None:
    lines = drawn(40, 3, 100, 70)
    assert sum("a-model" in line.split(" ")[0] for line in lines) == 40


def test_generated_text_is_shown_if_there_is_any() -> None:
    lines = drawn(1, 1, 80, 24, generates=True)
    assert any(line.startswith("text        98,765 tokens/s") for line in lines)
    assert any(line.startswith("first token p50 -") for line in lines)
    assert not any(line.startswith("text ") for line in drawn(1, 1, 80, 24))
    assert "98,765" in next(line for line in drawn(1, 1, 140, 24, generates=True) if "blk-0" in line)


def test_the_first_line_shows_reconnecting() -> None:
    assert "reconnecting no answer" in drawn(1, 1, 80, 24, "no answer (refused): is it running?")[0]
