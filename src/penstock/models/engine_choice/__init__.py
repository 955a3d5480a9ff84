"""What `engine: auto` becomes: by the processor's features, and by a short trial that is remembered."""
