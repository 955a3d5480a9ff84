"""OpenAI's API for models that generate text."""
