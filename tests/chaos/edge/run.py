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
MAX_MIB = 600


async def run(plan: ChaosPlan) -> Result:
    """Run the chosen parts. `attacks/TEXT` chooses the attacks whose names contain the text."""
    parts, name_filters = (tuple(text.partition("/")[at] for text in plan.chosen) for at in (0, 2))
    with EdgePeaks() as peaks:
        result = await run_parts(replace(plan, chosen=parts), _list_parts(name_filters))
    result.details["peaks_mib"] = peaks.details()
    for role in ("envoy", "gateway"):
        result.must(f"edge_{role}_mib", peaks.get_max_mib(role), high=MAX_MIB)
    return result


async def _run_attacks(name_filters: tuple[str, ...], plan: ChaosPlan) -> Result:
    chosen = [attack for attack in ATTACKS if replace(plan, chosen=name_filters).chooses(attack.name)]
    found = await attack_all(plan, [replace(attack, settings={**attack.settings, **EDGE}) for attack in chosen])
    renamed = {name.replace("attack", "edge_attack", 1): value for name, value in found.figures.items()}
    bars = [replace(bar, figure=bar.figure.replace("attack", "edge_attack", 1)) for bar in found.bars]
    return Result(renamed, found.details, bars)


async def _run_access(name_filters: tuple[str, ...], plan: ChaosPlan) -> Result:
    """Run the access scenarios. Gateways that require keys start Envoy by default; `rates` needs a setting."""
    return await run_parts(replace(plan, chosen=name_filters), {**ACCESS, "rates": partial(rates.run, settings=EDGE)})


def _list_parts(name_filters: tuple[str, ...]) -> Mapping[str, Scenario]:
    return {
        "headers": strangers.send_header_bombs,
        "messages": strangers.send_large_messages,
        "kill": edge_ends.kill,
        "drain": edge_ends.drain,
        "attacks": partial(_run_attacks, name_filters),
        "access": partial(_run_access, name_filters),
    }
