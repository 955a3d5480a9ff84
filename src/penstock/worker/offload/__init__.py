"""Runs tasks outside the worker's interpreter, in task processes.

A request goes from its runner to `task_pool`, which decides which blocks use task processes, chooses the process of a
call, and replaces processes that died. `task_process` is the worker's side of one process, `task_host` the process's
own side. `task_messages` converts the messages between both sides; `wire/ipc` transports them.
"""
