"""TLS for ports and channels, and CURVE for ZeroMQ sockets between hosts."""
