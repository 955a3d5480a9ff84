"""Image processing: decoding within limits, tiling, enlarging, and encoding."""
