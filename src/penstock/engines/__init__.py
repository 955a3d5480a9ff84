"""Engines, which run models: a protocol, and a file or folder per engine. Only engines import ML runtimes."""
