"""The live view of a server."""
