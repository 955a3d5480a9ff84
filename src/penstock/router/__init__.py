"""From a resolved request to a worker and back: policy, job table, dispatcher, lanes."""
