"""infinity-emb as a peer."""
