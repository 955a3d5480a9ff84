"""The doors that speak gRPC."""
