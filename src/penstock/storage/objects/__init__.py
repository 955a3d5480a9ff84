"""Where files are kept that are too large for a database: a folder, or an S3-compatible store."""
