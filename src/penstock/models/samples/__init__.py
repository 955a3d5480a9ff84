"""Real texts and photographs, with which models are tried and measured."""
