"""`scripts/bench`: compares the server with the highest rates that its engines can reach ("ceilings")."""
