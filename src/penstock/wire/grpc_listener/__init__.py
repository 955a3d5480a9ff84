"""The gRPC server that all listeners based on grpcio use."""
