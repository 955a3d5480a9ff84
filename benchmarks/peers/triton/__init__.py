"""Triton as a peer."""
