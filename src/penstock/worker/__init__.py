"""A process that holds blocks' instances and runs them."""
