"""The command line: parses arguments, and calls the packages app and client."""
