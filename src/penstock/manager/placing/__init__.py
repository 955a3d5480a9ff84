"""The placement of blocks on workers."""
