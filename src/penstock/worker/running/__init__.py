"""A block in memory: requests to batches, batches through instances, results to answers."""
