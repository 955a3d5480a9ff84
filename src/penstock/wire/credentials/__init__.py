"""Credentials on a wire, once for every role: TLS of each port and channel, CURVE of ZeroMQ between hosts."""
