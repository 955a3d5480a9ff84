"""Clients' streams of requests over gRPC and WebSockets, and answers as server-sent events."""
