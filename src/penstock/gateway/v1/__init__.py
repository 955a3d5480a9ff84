"""REST under /v1: embeddings, images, reranking, plain values for any block, and operations."""
