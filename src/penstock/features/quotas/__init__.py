"""Quotas of a server: requests per second and in total, of all callers, of a session and of a block."""
