"""TorchServe as a peer."""
