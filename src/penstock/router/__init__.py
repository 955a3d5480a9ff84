"""Routes requests to workers, and answers back to callers: policies, job table, dispatcher and lanes."""
