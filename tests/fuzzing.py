"""The number of random inputs per test: PENSTOCK_FUZZ_EXAMPLES, for example 100,000 for a thorough run."""

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("PENSTOCK_FUZZ_EXAMPLES", "150"))
# A short run tries the same inputs each time, so that it does not fail by chance.
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 1000,
    suppress_health_check=list(HealthCheck),
    database=None,
)
