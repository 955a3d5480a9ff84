"""KServe as a peer."""
