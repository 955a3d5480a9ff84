"""Runs models with OpenVINO, and converts models to OpenVINO's files."""
