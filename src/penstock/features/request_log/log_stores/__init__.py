"""The stores of the request log."""
