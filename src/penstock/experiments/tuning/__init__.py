"""The best settings of a model on this machine."""
