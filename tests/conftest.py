"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    # What importing all tests has brought stays: a look at all of it takes a second, and some tests ask for one.
    gc.collect()
    gc.freeze()
