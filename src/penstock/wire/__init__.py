"""Frames and sockets between gateways and workers, and the manager's stubs. The only user of ZeroMQ."""
