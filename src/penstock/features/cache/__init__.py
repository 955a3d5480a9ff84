"""The response cache: repeated and identical requests share one answer."""
