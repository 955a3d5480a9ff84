"""Encodes texts faster than a tokenizer: caches the token ids of words, and reads the special ids once."""
