"""The Open Inference Protocol over REST."""
