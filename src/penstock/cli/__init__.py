"""The command line: parses, then calls app or client."""
