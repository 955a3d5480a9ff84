"""Penstock on a GPU against the bare GPU, on a machine that need not reach any other: see README.md here."""
