"""Benchmarks of Penstock and of other inference servers ("peers")."""
