"""Tensors in memory that clients on this machine share."""
