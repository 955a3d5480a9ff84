"""Tasks in processes of their own, away from a worker's interpreter."""
