"""Runs models in processes of their own: starts them, logs their output, and replaces processes that ended."""
