"""Models on disk and in memory: folders, settings, loading, checking, converting and importing."""
