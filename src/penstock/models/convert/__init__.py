"""Other precisions of a model, held against the original."""
