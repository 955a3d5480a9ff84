"""Policies that choose the worker for a job."""
