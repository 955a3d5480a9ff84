"""HTTP servers and routes."""
