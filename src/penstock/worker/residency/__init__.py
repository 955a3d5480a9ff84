"""Which blocks are in memory, and which wait outside."""
