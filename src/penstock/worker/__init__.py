"""The worker process: loads blocks, and runs jobs on their instances."""
