"""Kill, cut off and stop workers: no inference may fail, and other workers must soon load their blocks."""

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Mapping

import grpc

from benchmarks.cluster import ClusterHosts
from benchmarks.waiting import until_seen
from penstock.pb.v1 import cluster_pb2, cluster_pb2_grpc
from tests.chaos.cluster.bed import GATEWAY_HOSTS, WORKER_HOSTS, ClusterBed, GatewayLoad
from tests.chaos.cluster.managers import Undo
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import ECHO, add_echo

ROUNDS = 3
REPLICAS = 2
ANSWERS_BETWEEN_FAULTS = 200
STOPPED_S = 10.0
BACK_S = 10.0
DEADLINE_S = 30.0
StartWorker = Callable[[int], object]
Fault = Callable[[ClusterHosts, int, StartWorker], Awaitable[Undo]]


async def run(plan: ChaosPlan) -> Result:
    models = plan.folder / "worker-models"
    add_echo(models)
    took: dict[str, list[float]] = {}
    victims: list[str] = []  # in turn, because a worker that restarts often gets no blocks for a while
    async with ClusterBed(models, plan.folder / "workers") as bed:
        block_id = await _scale(bed)
        await until_seen(lambda: len(bed.list_holders(block_id)) == REPLICAS, "the block has its replicas", DEADLINE_S)
        async with GatewayLoad(bed) as load:
            for number in range(1 if plan.is_quick else ROUNDS):
                for name, fault in FAULTS.items():
                    await load.answered_more(ANSWERS_BETWEEN_FAULTS)
                    took_s = await _run_round(bed, block_id, fault, victims)
                    took.setdefault(name, []).append(took_s)
                    plan.say(f"{name}, {number + 1}: replicas after {took_s:.1f} s")
    result = Result(details={"load": load.details(), "replicas_s": took})
    result.must("worker_failed", load.failed(), high=0)
    result.must("worker_replicas_s", max(seconds for each in took.values() for seconds in each), high=BACK_S)
    return result


async def _scale(bed: ClusterBed) -> str:
    """Deploy the echo model to some of the workers, so that others can take over; return its block id."""
    blocks = json.loads(bed.hosts.http(GATEWAY_HOSTS[0], "/v1/status")[1])["blocks"]
    block_id = next(str(block["block_id"]) for block in blocks if block["model"] == ECHO)
    leader = f"{bed.hosts.address(await bed.find_leader_host())}:7400"
    async with grpc.aio.insecure_channel(leader) as channel:
        asked = cluster_pb2.ChangeBlockRequest(block_id=block_id, changes=json.dumps({"replicas": REPLICAS}))
        answer = await cluster_pb2_grpc.ClusterStub(channel).ChangeBlock(asked, timeout=DEADLINE_S)
    assert not answer.HasField("failure"), answer.failure.message
    return block_id


async def _run_round(bed: ClusterBed, block_id: str, fault: Fault, victims: list[str]) -> float:
    """Cause the fault on one worker; return how long it took until other workers held its blocks."""
    last = {name: number for number, name in enumerate(victims, start=1)}
    victim = min(sorted(bed.list_holders(block_id)), key=lambda name: last.get(name, 0))
    victims.append(victim)
    host = next(host for host in WORKER_HOSTS if victim.startswith(f"h{host}."))
    began = time.monotonic()
    undo = await fault(bed.hosts, host, bed.start_worker)
    await until_seen(
        lambda: len(bed.list_holders(block_id) - {victim}) == REPLICAS, "it has its replicas again", DEADLINE_S
    )
    took_s = time.monotonic() - began
    await undo()
    await bed.wait_until_complete()
    await until_seen(
        lambda: len(bed.list_holders(block_id)) == REPLICAS, "it has no more than its replicas", DEADLINE_S
    )
    return took_s


async def _kill(hosts: ClusterHosts, host: int, start: StartWorker) -> Undo:
    hosts.roles[f"h{host}.worker"].kill()

    async def undo() -> None:
        start(host)

    return undo


async def _cut_off(hosts: ClusterHosts, host: int, start: StartWorker) -> Undo:
    hosts.cut_off(host)

    async def undo() -> None:
        hosts.heal(host)

    return undo


async def _stop(hosts: ClusterHosts, host: int, start: StartWorker) -> Undo:
    process, began = hosts.roles[f"h{host}.worker"], time.monotonic()
    process.signal(signal.SIGSTOP)

    async def undo() -> None:
        await asyncio.sleep(max(0.0, began + STOPPED_S - time.monotonic()))
        process.signal(signal.SIGCONT)

    return undo


FAULTS: Mapping[str, Fault] = {"worker killed": _kill, "worker cut off": _cut_off, "worker stopped": _stop}
