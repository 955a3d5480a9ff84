"""The cluster's scenarios, one after the other."""

from collections.abc import Mapping

from benchmarks.chaos.cluster import away, canary, canary_leaders, fleet, managers, placement, sessions, upload, workers
from benchmarks.chaos.report import ChaosPlan, Result, Scenario

PARTS: Mapping[str, Scenario] = {
    "placement": placement.run,
    "managers": managers.run,
    "away": away.run,
    "workers": workers.run,
    "canary": canary.run,
    "canary_leaders": canary_leaders.run,
    "fleet": fleet.run,
    "sessions": sessions.run,
    "upload": upload.run,
}


async def run(plan: ChaosPlan) -> Result:
    result = Result()
    for name, part in PARTS.items():
        if plan.chosen not in name:
            continue
        plan.say(name)
        result.add(name, await part(plan))
    return result
