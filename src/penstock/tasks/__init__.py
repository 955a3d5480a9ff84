"""What a block does to data: bytes to tensors and back. One file a task."""
