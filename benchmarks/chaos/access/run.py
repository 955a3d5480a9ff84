"""The scenarios of who may do what, one after the other."""

from collections.abc import Mapping

from benchmarks.chaos.access import direct, direct_attack, matrix, rates, rotation
from benchmarks.chaos.report import ChaosPlan, Result, Scenario

PARTS: Mapping[str, Scenario] = {
    "doors": matrix.run,
    "rates": rates.run,
    "rotation": rotation.run,
    "direct": direct.run,
    "attack": direct_attack.run,
}


async def run(plan: ChaosPlan) -> Result:
    result = Result()
    for name, part in PARTS.items():
        if plan.chosen not in name:
            continue
        plan.say(name)
        result.add(name, await part(plan))
    return result
