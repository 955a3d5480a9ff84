"""Settings for all tests."""

import gc
import os
import tempfile

# Every server that starts with minilm would otherwise try both engines, which takes a second of both cores.
os.environ.setdefault("PENSTOCK_WORKER__ENGINE_TRIAL_S", "0")

# The contexts and the environment of the user who runs the tests must select no server for the tests' commands.
os.environ["XDG_CONFIG_HOME"] = tempfile.gettempdir() + "/penstock-tests-without-contexts"
os.environ.pop("PENSTOCK_SERVER", None)


def pytest_collection_finish() -> None:
    # Imported objects stay: a full garbage collection over them takes a second, and some tests run one.
    gc.collect()
    gc.freeze()
