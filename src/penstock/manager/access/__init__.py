"""Who may do what in a cluster: its keys, the guard of a manager's doors, what was changed by whom."""
