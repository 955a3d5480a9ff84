"""`scripts/bench`: the server compared with its ceilings."""
