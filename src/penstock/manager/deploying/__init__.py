"""What is written when models are deployed."""
