"""Attacks on a running server: each is one strike, beside honest callers whose answers and waits are watched."""
