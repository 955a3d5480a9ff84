"""LitServe as a peer."""
