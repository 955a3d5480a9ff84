"""What hosts of a cluster know of each other."""
