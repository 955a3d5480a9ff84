"""What workers and gateways are told, by revision."""
