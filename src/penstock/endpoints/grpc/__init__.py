"""gRPC servers."""
