"""Deploying, loading and unloading of models."""
