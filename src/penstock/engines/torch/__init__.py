"""Runs PyTorch models from TorchScript, torch.export, transformers and ONNX files."""
