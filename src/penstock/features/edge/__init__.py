"""The edge: Envoy as the entrance of a server that other machines can reach, or that requires keys or TLS."""
