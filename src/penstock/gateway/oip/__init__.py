"""The Open Inference Protocol over gRPC and REST, with Triton's extensions."""
