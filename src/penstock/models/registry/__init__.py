"""A model on its way to the registry and back: what is sent, and what workers keep."""
