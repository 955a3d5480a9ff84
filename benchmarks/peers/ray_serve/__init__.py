"""Ray Serve as a peer."""
