"""Lanes: the transports that carry jobs from a gateway to workers."""
