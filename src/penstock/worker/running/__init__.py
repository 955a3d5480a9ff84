"""Runs a loaded block: groups requests into batches, runs the batches on instances, and splits results into answers."""
