"""Types, errors and configuration that every layer shares."""
