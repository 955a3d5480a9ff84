"""Stores for metadata, objects, counters and rows: one small protocol per kind, with its implementations."""
