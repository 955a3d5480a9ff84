"""The cluster's scenarios, one after the other."""

from collections.abc import Mapping

from benchmarks.chaos.cluster import placement
from benchmarks.chaos.report import ChaosPlan, Result, Scenario

PARTS: Mapping[str, Scenario] = {"placement": placement.run}


async def run(plan: ChaosPlan) -> Result:
    result = Result()
    for name, part in PARTS.items():
        plan.say(name)
        result.add(name, await part(plan))
    return result
