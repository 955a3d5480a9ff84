"""Stores of cached answers."""
