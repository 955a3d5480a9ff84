"""A model on disk and in memory: its folder, its settings, loading it; checking, converting and importing it."""
