"""Stores for files too large for a database: a folder, or an S3-compatible store."""
