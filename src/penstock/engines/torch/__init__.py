"""PyTorch, in each form that its models are saved in."""
