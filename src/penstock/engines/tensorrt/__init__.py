"""Runs ONNX files with TensorRT or TensorRT-RTX, which build an engine for a GPU; keeps built engines on disk."""
