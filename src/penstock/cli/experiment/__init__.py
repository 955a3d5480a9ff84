"""`penstock experiment`."""
