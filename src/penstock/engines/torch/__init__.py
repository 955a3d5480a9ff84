"""Runs PyTorch models, in each format in which they are saved."""
