"""The scenario `global_server`: quotas and the request log under load and faults."""

from collections.abc import Mapping

from tests.chaos.global_server import log_outage, quota_load, together
from tests.chaos.report import ChaosPlan, Result, Scenario, run_parts

PARTS: Mapping[str, Scenario] = {
    "quotas": quota_load.run,
    "log": log_outage.run,
    "together": together.run,
}


async def run(plan: ChaosPlan) -> Result:
    return await run_parts(plan, PARTS)
