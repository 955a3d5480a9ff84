"""The request log: one row per inference request, in SQLite, PostgreSQL or TimescaleDB."""
