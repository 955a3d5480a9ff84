"""Models that are Python classes, each instance in a process of its own."""
