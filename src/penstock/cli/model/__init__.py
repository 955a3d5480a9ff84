"""`penstock model`: one file a command."""
