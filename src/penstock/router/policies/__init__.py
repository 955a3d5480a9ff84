"""Which worker takes a job."""
