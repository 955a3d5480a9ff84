"""Send malformed messages over gRPC, REST and ZeroMQ: each must get a typed error, without crashes, hangs or leaks."""

import asyncio
from typing import Protocol

from benchmarks.server import ServerProcess
from penstock.models.samples.texts import mixed
from tests.chaos.answers import AttackAnswers
from tests.chaos.checked_load import CheckedLoad, EchoQuestion, EmbedQuestion
from tests.chaos.http_messages import list_valid_messages
from tests.chaos.malformed_grpc import GrpcAttack
from tests.chaos.malformed_rest import Connection, RestAttack
from tests.chaos.malformed_zmq import ZmqAttack
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_any_size_model, add_echo, add_shipped

SHARES = {"grpc": 0.5, "rest": 0.3, "zmq": 0.2}
ROUNDS = 10  # memory is compared after the first and after the last
SETTLE_S = 1.0
SEED = 2


class Attack(Protocol):
    answers: AttackAnswers

    async def send(self, count: int) -> None: ...


async def run(plan: ChaosPlan) -> Result:
    add_models(plan)
    with ServerProcess(plan.folder / "models", plan.folder / "malformed") as server:
        await server.wait_all_workers()
        return await attack(server, plan.malformed or (5_000 if plan.is_quick else 100_000), plan)


def add_models(plan: ChaosPlan) -> None:
    repository = plan.folder / "models"
    add_echo(repository)
    add_any_size_model(repository)
    add_shipped(repository, plan.models, "minilm")
    add_shipped(repository, plan.models, "srcnn")


async def attack(server: ServerProcess, count: int, plan: ChaosPlan, rounds: int = ROUNDS) -> Result:
    """Send `count` malformed messages while other callers send valid requests."""
    examples = min(2_000, count // 5)
    page = await asyncio.to_thread(server.get, "/openapi.json")
    grpc = GrpcAttack(server.grpc, examples, SEED)
    zmq = ZmqAttack(server.router_endpoint(), examples, SEED)
    attacks: dict[str, Attack] = {"grpc": grpc, "rest": RestAttack(server.http, page, examples, SEED), "zmq": zmq}
    embed = EmbedQuestion("minilm", mixed(min(512, count // 10), SEED))
    await embed.learn(server.grpc)
    # Engines keep data for every shape, so the first rounds should contain most shapes.
    async with CheckedLoad(server.grpc, [embed]) as load:
        await load.answered_more(min(3_000, count // 4), timeout_s=300)
    processes = server.process_ids()
    memory: list[int] = []
    async with CheckedLoad(server.grpc, [EchoQuestion(), embed], callers=4, pause_s=0.1) as neighbours:
        for number in range(rounds):
            for name, share in SHARES.items():
                await attacks[name].send(int(count * share) // rounds)
            await asyncio.sleep(SETTLE_S)
            memory.append(server.rss_bytes())
            plan.say(f"{number + 1} of {rounds}: {memory[-1] / 2**20:.1f} MiB")
    await grpc.close()
    result = _judge(server, attacks, memory)
    lost = len(processes - server.process_ids())
    result.must("malformed_crashes", result.figures["malformed_crashes"] + lost, high=0)
    result.must("malformed_neighbours_failed", neighbours.tally.failed, high=0)
    result.must("malformed_well_after", await _is_well(server) + await zmq.is_well(), low=2)
    result.details |= {"neighbours": neighbours.tally.details(), "processes_lost": lost}
    return result


def _judge(server: ServerProcess, attacks: dict[str, Attack], memory: list[int]) -> Result:
    answers = [attack.answers for attack in attacks.values()]
    tracebacks = server.tracebacks()
    result = Result()
    result.figures["malformed_sent"] = sum(found.sent for found in answers)
    result.figures["malformed_crashes"] = sum(found.crashes for found in answers) + tracebacks.total()
    result.must("malformed_hangs", sum(found.hangs for found in answers), high=0)
    result.must("malformed_rss_growth", memory[-1] / memory[0] - 1, high=0.02)
    result.details = {
        **{name: attack.answers.details() for name, attack in attacks.items()},
        "tracebacks": dict(tracebacks),
        "rss_mib": [round(size / 2**20, 1) for size in memory],
        "wire_errors": server.metric("penstock_wire_errors_total"),
    }
    return result


async def _is_well(server: ServerProcess) -> bool:
    """Return True if every valid request is answered over REST; other callers check gRPC."""
    connection = Connection(server.http)
    statuses = [(await connection.ask(message.encode()))[0] for message in list_valid_messages()]
    await connection.close()
    return set(statuses) == {200}
