"""Tensors in the shared memory of clients on the same machine."""
