"""Run ordered sessions while gateways are killed and added, with Redis: each request must run once, in order.

Two independent records show the order: the answers that clients get through any gateway, and the model's notes of its
runs.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import grpc
import yaml

from benchmarks.cluster import ClusterHosts
from benchmarks.repository import python_settings, write_model
from benchmarks.valkey import find_valkey_binary
from benchmarks.waiting import until, until_seen
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.calls import make_infer_request
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.session_load import RETRYABLE_CODES

MODEL = "notary"
MANAGER, WORKERS, GATEWAYS = 0, (1, 2), (3, 4, 5)  # hosts; two of the gateways are open at a time
REDIS_PORT = 6379
STEPS = 8
MAX_DISPLACEMENT = 4.0  # maximum distance of a request from its position in the order
REPEATED_SHARE = 0.2  # share of the requests that are sent twice
CONCURRENT_SESSIONS = 48  # sessions at a time
ANSWER_S, PATIENCE_S, PAUSE_S = 20.0, 120.0, 0.05
# A model that returns a new random number for each run, and notes each request in a file.
SOURCE = """import os, secrets
import numpy as np


class Model:
    def __init__(self, *_):
        self._notes = open(os.path.join({notes!r}, f"{{os.getpid()}}.txt"), "a", buffering=1)

    def infer(self, inputs, context):
        print(context.session_id, context.seq_no, file=self._notes)
        return {{"RUN": np.array([secrets.randbits(62)], np.int64)}}
"""


@dataclass(slots=True)
class RovingTally:
    answered: int = 0
    repeats: int = 0
    killed: int = 0
    added: int = 0
    lost: int = 0  # never answered
    changed: int = 0  # a repeat with a different answer
    out_of_order: int = 0
    ran_twice: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def violations(self) -> int:
        return self.lost + self.changed + self.out_of_order + self.ran_twice

    def note_runs(self, folder: Path) -> None:
        """Check the models' notes: each session must run on one worker, in order, and each step once."""
        runs: defaultdict[str, list[int]] = defaultdict(list)
        for file in sorted(folder.iterdir()):
            for line in file.read_text().splitlines():
                session, seq_no = line.split()
                runs[session].append(int(seq_no))
        for numbers in runs.values():
            self.ran_twice += len(numbers) - len(set(numbers))
            self.out_of_order += numbers != sorted(numbers)


class Gateways:
    """The running gateways, with a connection to each."""

    def __init__(self, hosts: ClusterHosts, flags: tuple[str, ...]) -> None:
        self._hosts = hosts
        self._flags = flags
        self._channels: dict[int, grpc.aio.Channel] = {}
        self.stubs: list[Any] = []

    async def open(self, host: int) -> None:
        self._hosts.gateway(host, self._hosts.address(MANAGER), *self._flags)
        await until_seen(lambda: self._hosts.http(host, "/v2/health/ready")[0] == 200, "the gateway is ready", 120.0)
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels[host] = grpc.aio.insecure_channel(f"{self._hosts.address(host)}:50051", options=options)
        self._connect()

    async def kill(self, host: int) -> None:
        channel = self._channels.pop(host)
        self._connect()
        await asyncio.to_thread(self._hosts.roles[f"h{host}.gateway"].kill)
        await channel.close()

    def open_hosts(self) -> list[int]:
        return list(self._channels)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _connect(self) -> None:
        self.stubs = [GRPCInferenceServiceStub(channel) for channel in self._channels.values()]


async def run(plan: ChaosPlan) -> Result:
    rounds, sessions = (1, 400) if plan.is_quick else (4, 2_400)
    folder = plan.folder / "session-hosts"
    _add_notary(folder)
    tally = RovingTally()
    with ClusterHosts(len((MANAGER, *WORKERS, *GATEWAYS)), folder) as hosts:
        redis = await _start_redis(hosts, folder)
        hosts.manager(MANAGER, folder / "models")
        for host in WORKERS:
            hosts.worker(host, hosts.address(MANAGER))
        gateways = Gateways(hosts, ("--config", str(redis)))
        for host in GATEWAYS[:2]:
            await gateways.open(host)
        await until_seen(
            lambda: all(len(hosts.workers(host)) == 2 for host in GATEWAYS[:2]), "both know the workers", 60
        )
        started = time.monotonic()
        churning = asyncio.create_task(_replace_gateways(gateways, rounds, sessions * STEPS, tally, plan.say))
        names = iter(range(sessions))
        await asyncio.gather(*(_play_all(names, gateways, tally) for _ in range(CONCURRENT_SESSIONS)))
        await churning
        took_s = time.monotonic() - started
        await gateways.close()
    tally.note_runs(folder / "notes")
    result = Result(details={**asdict(tally), "failures": dict(tally.failures), "requests": sessions * STEPS})
    result.details["requests_per_s"] = round(tally.answered / took_s)
    result.must("session_violations", tally.violations, high=0)
    result.must("session_gateways_killed", tally.killed, low=rounds)
    result.must("session_gateways_added", tally.added, low=rounds)
    return result


async def _start_redis(hosts: ClusterHosts, folder: Path) -> Path:
    """Start Redis and return the settings of gateways that use it."""
    address = hosts.address(MANAGER)
    options = ("--port", str(REDIS_PORT), "--bind", address, "--protected-mode", "no", "--save", "")
    redis = hosts.run(MANAGER, [find_valkey_binary(), *options], folder / "redis.log")
    await until_seen(lambda: "Ready to accept" in redis.log.read_text(), "Redis is ready", 30.0)
    settings = folder / "gateway.yaml"
    settings.write_text(yaml.safe_dump({"sessions": {"url": f"redis://{address}:{REDIS_PORT}/0"}}))
    return settings


def _add_notary(folder: Path) -> None:
    (folder / "notes").mkdir(parents=True)
    settings = python_settings("INPUT", "RUN", "INT64", [1], instances={"count": 1})
    source = SOURCE.format(notes=str(folder / "notes")).encode()
    write_model(folder / "models" / MODEL, "model.py", source, **settings)


async def _replace_gateways(
    gateways: Gateways, rounds: int, total: int, tally: RovingTally, say: Callable[[str], None]
) -> None:
    """In each round, kill one gateway, and later add another."""
    for number in range(rounds):
        share = total // (2 * rounds + 1)
        await until(lambda goal=share * (2 * number + 1): tally.answered >= goal, "some are answered", inf)  # type: ignore[misc]
        spare = next(host for host in GATEWAYS if host not in gateways.open_hosts())
        await gateways.kill(gateways.open_hosts()[0])
        tally.killed += 1
        say(f"killed a gateway ({tally.killed} of {rounds}) after {tally.answered:,} answers")
        await until(lambda goal=share * (2 * number + 2): tally.answered >= goal, "some are answered", inf)  # type: ignore[misc]
        await gateways.open(spare)
        tally.added += 1
        say(f"added a gateway ({tally.added} of {rounds}) after {tally.answered:,} answers")


async def _play_all(names: Iterator[int], gateways: Gateways, tally: RovingTally) -> None:
    for name in names:
        rng = Random(name)
        numbers = list(range(1, STEPS + 1))
        numbers += [seq_no for seq_no in numbers if rng.random() < REPEATED_SHARE]
        order = sorted(numbers, key=lambda seq_no: seq_no + rng.uniform(0, MAX_DISPLACEMENT))
        told = await asyncio.gather(
            *(_send_until_answered(f"session-{name}", seq_no, gateways, rng, tally) for seq_no in order)
        )
        answers: defaultdict[int, set[bytes]] = defaultdict(set)
        for seq_no, answer in zip(order, told, strict=True):
            if answer is None:
                tally.lost += 1
                continue
            tally.answered += 1
            tally.repeats += "session_repeat" in answer.parameters
            tally.out_of_order += answer.parameters["session_step"].int64_param != seq_no
            answers[seq_no].add(answer.raw_output_contents[0])
        tally.changed += sum(len(found) > 1 for found in answers.values())


async def _send_until_answered(
    session: str, seq_no: int, gateways: Gateways, rng: Random, tally: RovingTally
) -> pb.ModelInferResponse | None:
    message = make_infer_request(MODEL, ("INPUT", "INT64", (1,), seq_no.to_bytes(8, "little")))
    message.parameters["session_id"].string_param = session
    message.parameters["seq_no"].int64_param = seq_no
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        try:
            answer: pb.ModelInferResponse = await rng.choice(gateways.stubs).ModelInfer(message, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            code = str(dict(error.trailing_metadata() or ()).get("penstock-code", error.code().name.lower()))
            tally.failures[code if code in RETRYABLE_CODES else f"{code}: {error.details()}"] += 1
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            tally.failures[type(error).__name__] += 1  # its connection was closed
        else:
            return answer
        await asyncio.sleep(PAUSE_S)
    return None
