"""Where cached answers are kept: in memory, in SQLite, in Redis."""
