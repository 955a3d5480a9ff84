"""Which workers hold which blocks."""
