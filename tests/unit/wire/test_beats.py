"""Heartbeats in threads: who has been silent, and for how long of the time that was listened."""

import time
from math import inf
from pathlib import Path

from benchmarks.waiting import until
from penstock.wire.beats import GatewayHeart, Silences, WorkerHeart
from penstock.wire.endpoints import Endpoint

BEAT_S = 0.02


def test_silence_is_counted_while_it_is_listened() -> None:
    silences = Silences(most_s=1.0, now=100.0)
    assert silences.of(b"a") == inf
    silences.heard(b"a")
    assert silences.of(b"a") == inf  # a stranger
    silences.follow(b"a")
    silences.turn(100.5)
    silences.follow(b"b")
    silences.follow(b"a")
    silences.turn(101.25)
    assert (silences.of(b"a"), silences.of(b"b")) == (1.25, 0.75)
    silences.heard(b"a")
    assert silences.of(b"a") == 0
    silences.forget(b"a")
    silences.forget(b"a")
    assert silences.of(b"a") == inf


def test_the_time_that_this_process_was_held_up_is_nobodys_silence() -> None:
    silences = Silences(most_s=1.0, now=0.0)
    silences.follow("gateway")
    silences.turn(60.0)
    assert silences.of("gateway") == 1.0


async def test_hearts_beat_while_loops_are_busy(tmp_path: Path) -> None:
    gateway = GatewayHeart(Endpoint(f"ipc://{tmp_path / 'g.ipc'}"), BEAT_S)
    worker = WorkerHeart(b"worker", BEAT_S)
    worker.meet(gateway.endpoint)
    gateway.silences.follow(b"worker")
    end = time.monotonic() + 40 * BEAT_S
    while time.monotonic() < end:  # the loop of both does not turn
        pass
    assert gateway.silences.of(b"worker") < 20 * BEAT_S
    assert worker.silences.of(gateway.endpoint) < 20 * BEAT_S
    worker.close()
    worker.close()
    await until(lambda: gateway.silences.of(b"worker") > 20 * BEAT_S)
    gateway.close()


async def test_a_gateway_that_is_gone_is_silent_and_one_that_is_left_is_forgotten(tmp_path: Path) -> None:
    first, second = (GatewayHeart(Endpoint(f"ipc://{tmp_path / name}"), BEAT_S) for name in ("1.ipc", "2.ipc"))
    worker = WorkerHeart(b"worker", BEAT_S)
    for gateway in (first, second):
        worker.meet(gateway.endpoint)
        gateway.silences.follow(b"worker")
    first.close()
    worker.leave(second.endpoint)
    await until(lambda: 10 * BEAT_S < worker.silences.of(first.endpoint) < inf)
    assert worker.silences.of(second.endpoint) == inf
    await until(lambda: second.silences.of(b"worker") > 10 * BEAT_S)
    worker.close()
    second.close()


async def test_it_listens_at_a_port_of_its_own() -> None:
    heart = GatewayHeart(Endpoint("tcp://127.0.0.1:0", host="gateway.example").beside(), BEAT_S)
    assert heart.endpoint.startswith("tcp://gateway.example:")
    assert not heart.endpoint.endswith(":0")
    heart.close()
