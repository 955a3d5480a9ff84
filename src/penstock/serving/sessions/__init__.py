"""Requests that belong together, each run once and in order."""
