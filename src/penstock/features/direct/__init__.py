"""Direct connections from clients to workers."""
