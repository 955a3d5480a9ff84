"""Commands that ask the managers of a cluster."""
