"""The election of the leader among several managers."""
