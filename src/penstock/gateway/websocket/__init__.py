"""Streams of requests over WebSockets and gRPC."""
