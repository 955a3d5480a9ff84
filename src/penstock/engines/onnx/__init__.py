"""Runs ONNX files with ONNX Runtime, and builds and converts such files."""
