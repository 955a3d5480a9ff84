"""The names of the processors that generate load, and of those that compute."""

from penstock.models.engine_choice.candidates import BF16_FEATURES
from penstock.telemetry.machine import read_processor_features, read_processor_name


def processors() -> dict[str, str]:
    """Return both processors; on one machine they are the same, but each is named because ratios depend on them."""
    found = [feature for feature in BF16_FEATURES if feature in read_processor_features()]
    name = f"{read_processor_name()}, {f'BF16 ({found[0]})' if found else 'no BF16'}"
    return {"load_generator": name, "engine": name}
