"""BentoML as a peer."""
