"""Who may do what: one guard for every door, and the keys that it goes by."""
