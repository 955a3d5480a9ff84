"""OpenAI's API to models that generate: `/v1/chat/completions` and `/v1/completions`."""
