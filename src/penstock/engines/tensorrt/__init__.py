"""TensorRT and TensorRT-RTX: an ONNX file becomes an engine of the GPU's own, which is kept on disk."""
