"""Answers given again, and runs shared by identical requests."""
