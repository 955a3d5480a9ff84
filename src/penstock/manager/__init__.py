"""The control plane of one cluster: models, blocks, workers, their health."""
