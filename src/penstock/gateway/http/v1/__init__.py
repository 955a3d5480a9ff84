"""`/v1`: what OpenAI's and Cohere's clients speak, and plain values for any block."""
