"""Many requests of one command: their order, failures that stop them, and errors that end a command."""

import threading

import numpy as np
import pytest

from penstock.core.errors import Unavailable
from penstock.terminal.request_sender import CHUNK, ask_all, ask_in_chunks, exit_with_problems


def test_answers_keep_the_order_of_the_items() -> None:
    is_second_done = threading.Event()

    def ask(item: int) -> int:
        if item == 0:
            assert is_second_done.wait(10.0)
        else:
            is_second_done.set()
        return item * 10

    assert ask_all("asking", ask, [0, 1], 2) == [0, 10]


def test_an_exception_stops_the_other_requests() -> None:
    asked: list[int] = []
    pause = threading.Event()

    def ask(item: int) -> None:
        asked.append(item)
        if item == 0:
            raise Unavailable("away")
        pause.wait(0.05)  # long enough for the command to notice the first failure

    with pytest.raises(Unavailable):
        ask_all("asking", ask, range(1000), 1)
    assert len(asked) < 1000


def test_texts_are_sent_in_chunks_and_joined() -> None:
    sizes: list[int] = []

    def lengths(texts: object) -> np.ndarray:
        assert isinstance(texts, list)
        sizes.append(len(texts))
        return np.array([len(text) for text in texts])

    texts = ["x" * (number % 7) for number in range(CHUNK + 1)]
    assert ask_in_chunks("asking", lengths, texts).tolist() == [len(text) for text in texts]
    assert sorted(sizes) == [1, CHUNK]


def test_errors_end_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    exit_with_problems([])
    with pytest.raises(SystemExit) as left:
        exit_with_problems(["a.png: is no image", "b.png: is no image"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "penstock: a.png: is no image\npenstock: b.png: is no image\n"
