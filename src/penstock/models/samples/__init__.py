"""Real texts and photographs to try models with."""
