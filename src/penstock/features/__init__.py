"""Capabilities, one folder each, which do not import each other."""
