"""Logs, metrics, traces, readiness and supervised background tasks."""
