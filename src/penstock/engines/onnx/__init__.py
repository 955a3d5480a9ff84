"""ONNX Runtime, and the files that it runs."""
