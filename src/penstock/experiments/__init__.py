"""Generates load, runs experiments, and tunes models."""
