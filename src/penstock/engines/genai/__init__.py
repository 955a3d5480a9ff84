"""Generates text for many requests at once with OpenVINO GenAI, in a separate process."""
