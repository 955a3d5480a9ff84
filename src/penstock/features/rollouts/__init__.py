"""Rollouts, traffic splits and shadow traffic."""
