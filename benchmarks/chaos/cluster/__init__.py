"""Faults of a cluster: its managers, gateways, workers and what they stand on."""
