"""Measurements beside the package: Penstock and its peers, side by side."""
