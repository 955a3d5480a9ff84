"""The path of every request: admit, resolve, cache, route, collect, log."""
