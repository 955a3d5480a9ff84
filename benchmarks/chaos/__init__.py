"""Fault scenarios against a real server: each kills, stops, floods or confuses it under load."""
