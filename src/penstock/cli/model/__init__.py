"""`penstock model`: one module per command."""
