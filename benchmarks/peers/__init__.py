"""Penstock's peers, each in a venv of its own, under the same load."""
