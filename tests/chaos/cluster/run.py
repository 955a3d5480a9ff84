"""The scenario `cluster`: faults of managers, workers, gateways and etcd on several hosts."""

from collections.abc import Mapping

from tests.chaos.cluster import (
    away,
    canary,
    canary_leaders,
    cut_gateway,
    fleet,
    managers,
    placement,
    sessions,
    upload,
    workers,
)
from tests.chaos.report import ChaosPlan, Result, Scenario, run_parts

PARTS: Mapping[str, Scenario] = {
    "placement": placement.run,
    "managers": managers.run,
    "away": away.run,
    "cut_gateway": cut_gateway.run,
    "workers": workers.run,
    "canary": canary.run,
    "canary_leaders": canary_leaders.run,
    "fleet": fleet.run,
    "sessions": sessions.run,
    "upload": upload.run,
}


async def run(plan: ChaosPlan) -> Result:
    return await run_parts(plan, PARTS)
