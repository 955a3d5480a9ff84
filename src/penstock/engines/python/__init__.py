"""Runs models that are Python classes, each instance in a separate process."""
