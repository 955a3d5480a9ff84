"""The load generator: sends requests to a server, and measures throughput and latency."""
