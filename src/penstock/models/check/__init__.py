"""Checks a model's folder, and reports problems with advice."""
