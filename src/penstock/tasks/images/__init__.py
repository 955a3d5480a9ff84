"""Images on their way in and out: read within limits, cut into tiles, written as files."""
