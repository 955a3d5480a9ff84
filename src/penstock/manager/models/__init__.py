"""The model registry: versions that are uploaded once and never change."""
