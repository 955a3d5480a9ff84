"""Commands that have text generated."""
