"""Fleets: start, stop and watch the roles of a cluster on one or more machines."""
