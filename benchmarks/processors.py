"""The processors that a figure was taken on: what loads, and what computes."""

from penstock.models.engine_choice.candidates import BF16_FEATURES
from penstock.telemetry.machine import processor, processor_features


def processors() -> dict[str, str]:
    """On one machine both are the same; they are named for themselves since that is what a ratio hangs on."""
    found = [feature for feature in BF16_FEATURES if feature in processor_features()]
    name = f"{processor()}, {f'BF16 ({found[0]})' if found else 'no BF16'}"
    return {"load_generator": name, "engine": name}
