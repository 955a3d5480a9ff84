"""The scenario `access`: faults and attacks on a cluster that requires keys or certificates."""

from collections.abc import Mapping

from tests.chaos.access import direct, direct_attack, matrix, rates, rotation
from tests.chaos.report import ChaosPlan, Result, Scenario, run_parts

PARTS: Mapping[str, Scenario] = {
    "endpoints": matrix.run,
    "rates": rates.run,
    "rotation": rotation.run,
    "direct": direct.run,
    "attack": direct_attack.run,
}


async def run(plan: ChaosPlan) -> Result:
    return await run_parts(plan, PARTS)
