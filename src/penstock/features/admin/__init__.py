"""Administration of a cluster: workers, blocks, events and metrics over gRPC, REST and the command line."""
