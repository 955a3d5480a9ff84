"""Stores of callers' use of their limits: in memory, or shared in Redis."""
