"""Scenarios of who may do what: limits, keys, tokens and certificates under load and faults."""
