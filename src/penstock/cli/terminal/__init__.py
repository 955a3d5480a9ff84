"""What commands share: options, progress, texts and files in and out, Ctrl-C."""
