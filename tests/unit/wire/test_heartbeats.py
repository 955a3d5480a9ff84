"""Heartbeats in threads: silence of peers, counted only while this process listened."""

import time
from math import inf
from pathlib import Path

import pytest

from benchmarks.waiting import until
from penstock.telemetry.background import list_supervised_loops
from penstock.wire.heartbeats import GatewayHeartbeats, PeerSilence, WorkerHeartbeats
from penstock.wire.zmq_endpoints import Endpoint

BEAT_S = 0.02


def test_silence_is_counted_while_the_process_listens() -> None:
    silence = PeerSilence(max_step_s=1.0, now=100.0)
    assert silence.seconds(b"a") == inf
    silence.record_heartbeat(b"a")
    assert silence.seconds(b"a") == inf  # an unknown worker
    silence.track(b"a")
    silence.advance(100.5)
    silence.track(b"b")
    silence.track(b"a")
    silence.advance(101.25)
    assert (silence.seconds(b"a"), silence.seconds(b"b")) == (1.25, 0.75)
    silence.record_heartbeat(b"a")
    assert silence.seconds(b"a") == 0
    silence.forget(b"a")
    silence.forget(b"a")
    assert silence.seconds(b"a") == inf


def test_time_in_which_this_process_was_blocked_is_not_silence() -> None:
    silence = PeerSilence(max_step_s=1.0, now=0.0)
    silence.track("gateway")
    silence.advance(60.0)
    assert silence.seconds("gateway") == 1.0


async def test_heartbeats_are_sent_while_loops_are_busy(tmp_path: Path) -> None:
    gateway = GatewayHeartbeats(Endpoint(f"ipc://{tmp_path / 'g.ipc'}"), BEAT_S)
    worker = WorkerHeartbeats(b"worker", BEAT_S)
    worker.add_gateway(gateway.endpoint)
    gateway.silence.track(b"worker")
    end = time.monotonic() + 40 * BEAT_S
    while time.monotonic() < end:  # the loop of both does not run
        pass
    assert gateway.silence.seconds(b"worker") < 20 * BEAT_S
    assert worker.silence.seconds(gateway.endpoint) < 20 * BEAT_S
    worker.close()
    worker.close()
    await until(lambda: gateway.silence.seconds(b"worker") > 20 * BEAT_S)
    gateway.close()


async def test_heartbeats_continue_after_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: set[PeerSilence] = set()
    advanced: set[PeerSilence] = set()
    advance = PeerSilence.advance

    def fail_once(silence: PeerSilence, now: float) -> None:
        if silence not in failed:
            failed.add(silence)
            raise LookupError("injected")
        advance(silence, now)
        advanced.add(silence)

    monkeypatch.setattr(PeerSilence, "advance", fail_once)
    gateway = GatewayHeartbeats(Endpoint(f"ipc://{tmp_path / 'g.ipc'}"), BEAT_S)
    worker = WorkerHeartbeats(b"worker", BEAT_S)
    await until(lambda: advanced == {gateway.silence, worker.silence} == failed)
    names = {"gateway-beats", "worker-beats"}
    assert names <= {loop.name for loop in list_supervised_loops()}, "their failures make the role unready"
    worker.close()
    gateway.close()
    assert not names & {loop.name for loop in list_supervised_loops()}


async def test_a_lost_gateway_is_silent_and_a_disconnected_one_is_forgotten(tmp_path: Path) -> None:
    first, second = (GatewayHeartbeats(Endpoint(f"ipc://{tmp_path / name}"), BEAT_S) for name in ("1.ipc", "2.ipc"))
    worker = WorkerHeartbeats(b"worker", BEAT_S)
    for gateway in (first, second):
        worker.add_gateway(gateway.endpoint)
        gateway.silence.track(b"worker")
    first.close()
    worker.remove_gateway(second.endpoint)
    await until(lambda: 10 * BEAT_S < worker.silence.seconds(first.endpoint) < inf)
    assert worker.silence.seconds(second.endpoint) == inf
    await until(lambda: second.silence.seconds(b"worker") > 10 * BEAT_S)
    worker.close()
    second.close()


async def test_heartbeats_have_their_own_port() -> None:
    heartbeats = GatewayHeartbeats(
        Endpoint("tcp://127.0.0.1:0", host="gateway.example").make_heartbeat_endpoint(), BEAT_S
    )
    assert heartbeats.endpoint.startswith("tcp://gateway.example:")
    assert not heartbeats.endpoint.endswith(":0")
    heartbeats.close()
