"""Makes the first pass of every supervised loop fail; put this folder on PYTHONPATH."""

import os
import sys
from collections.abc import Awaitable

from penstock.telemetry import background

start = background.SupervisedLoop.run


async def run(loop: background.SupervisedLoop) -> None:
    run_pass = loop.run_pass
    passes = 0

    def fail_once() -> Awaitable[object] | None:
        nonlocal passes
        passes += 1
        if passes <= 2:
            with open(os.environ["FAILING_LOOPS"], "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {sys.argv[1]} {loop.name} {passes}\n")
        if passes == 1:
            raise LookupError("injected")
        return run_pass()

    loop.run_pass = fail_once
    await start(loop)


setattr(background.SupervisedLoop, "run", run)  # noqa: B010
