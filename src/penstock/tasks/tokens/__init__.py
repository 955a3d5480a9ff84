"""Token ids, as a model's own tokenizer gives them."""
