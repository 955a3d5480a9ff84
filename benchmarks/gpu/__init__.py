"""Penstock on a GPU compared with the bare GPU, on a machine without a network; README.md describes it."""
