"""Chooses the engine for `engine: auto`: from the processor's features, or from a short trial of the engines."""
