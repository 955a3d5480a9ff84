"""`scripts/bench`: the server against its ceilings."""
