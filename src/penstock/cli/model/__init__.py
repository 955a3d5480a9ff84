"""`penstock model`: commands to check, list, import, build and quantize models."""
