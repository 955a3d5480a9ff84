"""Clients' streams of requests, over gRPC and WebSockets."""
