"""Options, output, progress and server access that commands share."""
