"""Tasks off the worker's interpreter: in processes of its own, or in task workers that it shares with others.

A request goes from its runner to `pool` (which blocks use them, which process, and another when one dies) →
`process` (one of them, as the worker sees it; `peer` is what is at its other end) → `host` (the process's own side).
What they say to each other is in `contents`; how it travels, in `wire/ipc`.
"""
