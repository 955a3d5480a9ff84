"""Asynchronous requests: a client gets an id at once, and the answer later, from any gateway."""
