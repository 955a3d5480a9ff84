"""The block protocol: packets for any block, over gRPC and REST."""
