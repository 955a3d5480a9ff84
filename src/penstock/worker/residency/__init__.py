"""Loads and unloads a worker's blocks, and queues the jobs of blocks that are not loaded."""
