"""The control plane of one cluster: models, blocks, workers and their health."""
