"""OpenVINO, and the files that it runs."""
