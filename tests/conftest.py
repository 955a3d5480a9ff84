"""What holds for all tests."""

import gc
import os

# Every server that starts with minilm would try both engines, which takes a second of both cores.
os.environ.setdefault("PENSTOCK_WORKER__ENGINE_TRIAL_S", "0")


def pytest_collection_finish() -> None:
    # What importing all tests has brought stays: a look at all of it takes a second, and some tests ask for one.
    gc.collect()
    gc.freeze()
