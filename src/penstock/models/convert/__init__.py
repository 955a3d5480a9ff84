"""Converts models to other precisions, and compares the converted models with the original."""
