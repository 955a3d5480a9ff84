"""What operators ask of a manager: how the cluster stands, and what is to be another."""
