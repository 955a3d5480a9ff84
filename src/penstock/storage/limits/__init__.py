"""What callers have used of their limits, in this process or for all gateways."""
