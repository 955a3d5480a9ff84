"""The live view: the page, and the stream of events that it draws."""
