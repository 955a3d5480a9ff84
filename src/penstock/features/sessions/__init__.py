"""Ordered sessions, within one gateway and between gateways."""
