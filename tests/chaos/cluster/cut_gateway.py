"""Cut a gateway off from etcd and all managers, but not from the workers: it must continue to answer."""

from benchmarks.waiting import until_seen
from tests.chaos.cluster.bed import ETCD_HOSTS, GATEWAY_HOSTS, MANAGER_HOSTS, WORKER_HOSTS, ClusterBed, GatewayLoad
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_echo

ANSWERS_BETWEEN_FAULTS = 300
UNLISTED_S = 60.0


async def run(plan: ChaosPlan) -> Result:
    models = plan.folder / "cut-gateway-models"
    add_echo(models)
    async with ClusterBed(models, plan.folder / "cut-gateway") as bed:
        victim, others = GATEWAY_HOSTS[0], (*ETCD_HOSTS, *MANAGER_HOSTS)
        async with GatewayLoad(bed) as load:
            await load.answered_more(ANSWERS_BETWEEN_FAULTS)
            bed.hosts.separate(victim, *others)
            await until_seen(lambda: _is_unlisted_everywhere(bed), "the managers drop the gateway", UNLISTED_S)
            await load.answered_more(ANSWERS_BETWEEN_FAULTS)
            left = len(WORKER_HOSTS) - len(bed.list_serving_blocks(victim))
            plan.say("the gateway answers without managers")
            bed.hosts.unite(victim, *others)
            await bed.wait_until_complete()
            await load.answered_more(ANSWERS_BETWEEN_FAULTS)
    result = Result(details={"load": load.details()})
    result.must("cut_gateway_failed", load.failed(), high=0)
    result.must("cut_gateway_workers_left", left, high=0)
    return result


def _is_unlisted_everywhere(bed: ClusterBed) -> bool:
    """Return whether every worker knows that the managers no longer list the gateway."""
    return all(bed.hosts.roles[f"h{host}.worker"].lines("gateway_unlisted") for host in WORKER_HOSTS)
