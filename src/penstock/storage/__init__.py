"""Where state lives: one small protocol a kind, its implementations beside it."""
