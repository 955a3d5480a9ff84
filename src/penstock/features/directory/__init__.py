"""The directory: inference servers and clusters that register themselves, and queries over them."""
