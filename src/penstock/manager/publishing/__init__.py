"""Updates for workers and gateways, by revision."""
