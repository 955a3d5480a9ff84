"""What runs tensors: one protocol, one file an engine. The only place that imports ML runtimes."""
