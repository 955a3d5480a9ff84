"""The scenario `edge`: attacks on Envoy and the gateways behind it, and the end of Envoy and of the server."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from tests.chaos.access import rates
from tests.chaos.access.run import PARTS as ACCESS
from tests.chaos.attack.run import ATTACKS, attack_all
from tests.chaos.edge import edge_ends, strangers
from tests.chaos.edge.edge_peaks import EdgePeaks
from tests.chaos.report import ChaosPlan, Result, Scenario, run_parts

EDGE = {"edge": "envoy"}
MOST_MIB = 600


async def run(plan: ChaosPlan) -> Result:
    """Run the chosen parts; `attacks/TEXT` means those of the attacks whose names have this text in them."""
    parts, within = (tuple(text.partition("/")[at] for text in plan.chosen) for at in (0, 2))
    with EdgePeaks() as peaks:
        result = await run_parts(replace(plan, chosen=parts), _parts(within))
    result.details["peaks_mib"] = peaks.details()
    for role in ("envoy", "gateway"):
        result.must(f"edge_{role}_mib", peaks.most_mib(role), high=MOST_MIB)
    return result


async def _attacks(within: tuple[str, ...], plan: ChaosPlan) -> Result:
    chosen = [attack for attack in ATTACKS if replace(plan, chosen=within).chooses(attack.name)]
    found = await attack_all(plan, [replace(attack, settings={**attack.settings, **EDGE}) for attack in chosen])
    renamed = {name.replace("attack", "edge_attack", 1): value for name, value in found.figures.items()}
    bars = [replace(bar, figure=bar.figure.replace("attack", "edge_attack", 1)) for bar in found.bars]
    return Result(renamed, found.details, bars)


async def _access(within: tuple[str, ...], plan: ChaosPlan) -> Result:
    """Run the access scenarios. Their gateways require keys, and so they have an edge, except those of `rates`."""
    return await run_parts(replace(plan, chosen=within), {**ACCESS, "rates": partial(rates.run, settings=EDGE)})


def _parts(within: tuple[str, ...]) -> Mapping[str, Scenario]:
    return {
        "headers": strangers.header_bombs,
        "messages": strangers.large_messages,
        "kill": edge_ends.kill,
        "drain": edge_ends.drain,
        "attacks": partial(_attacks, within),
        "access": partial(_access, within),
    }
