"""Checkpoints become models of a repository."""
