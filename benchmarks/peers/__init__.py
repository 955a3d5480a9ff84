"""Comparison of Penstock with its peers, each in its own venv, under the same load."""
