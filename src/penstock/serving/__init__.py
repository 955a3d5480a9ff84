"""The one order of every request: admit, resolve, cache, route, collect, log."""
