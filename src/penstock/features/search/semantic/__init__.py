"""The semantic policy: ranks blocks by the vectors of their texts."""
