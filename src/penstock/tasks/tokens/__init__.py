"""Encodes texts faster than the tokenizers library, by caching the token ids of words."""
