"""Penstock meters inference requests onto models."""
