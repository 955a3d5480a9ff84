"""Processes that models run in, beside the worker: their start, their output, their end, and their successors."""
