"""Finds the best settings of a model on this machine."""
