"""The SDK: a sync and an async client."""
