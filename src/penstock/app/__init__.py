"""Assembles each role (manager, gateway, worker, directory, or a whole server) from the other packages."""
