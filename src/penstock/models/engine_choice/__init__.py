"""Chooses the engine for `engine: auto` by the processor's features, or by a short trial whose result is stored."""
