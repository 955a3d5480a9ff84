"""What is wrong with a model's folder, and what to do."""
