"""The only wiring: one file a role, the supervisor, where things are."""
