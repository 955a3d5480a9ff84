"""How jobs travel from a gateway to workers."""
