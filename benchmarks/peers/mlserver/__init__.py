"""MLServer as a peer."""
