"""The model registry: uploads, versions, aliases and downloads."""
