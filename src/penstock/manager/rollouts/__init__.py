"""Rollouts: a name moves from one block to another, watched, and back at the first fault."""
