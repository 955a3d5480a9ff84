"""Push a large model to the registry and pull it again, with two interruptions of the connection in each direction."""

import asyncio
import hashlib
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cluster import start_manager
from benchmarks.repository import python_settings, write_model
from tests.chaos.cluster.fault_proxy import FaultProxy
from tests.chaos.report import ChaosPlan, Result

SIZE, QUICK_SIZE = 1024**3, 128 * 1024**2
MIB = 1024 * 1024
SAMPLE_S = 0.02
COMMAND_S = 600.0
CODE = b"""class Model:
    def infer(self, inputs, context):
        return {"y": inputs["x"]}
"""


async def run(plan: ChaosPlan) -> Result:
    size = QUICK_SIZE if plan.is_quick else SIZE
    plan = replace(plan, folder=plan.folder / "upload")
    model = plan.folder / "large"
    await asyncio.to_thread(write_large, model, size)
    (plan.folder / "models").mkdir()
    manager = await asyncio.to_thread(
        start_manager, plan.folder / "models", plan.folder, PENSTOCK_REGISTRY__HTTP_PORT="0"
    )
    try:
        port = int(manager.lines("manager_started")[0]["address"].rpartition(":")[2])
        return await transfer_model(plan, model, size, port, manager.pid)
    finally:
        await asyncio.to_thread(manager.stop)


async def transfer_model(plan: ChaosPlan, model: Path, size: int, port: int, pid: int) -> Result:
    idle = psutil.Process(pid).memory_info().rss
    result = Result()
    async with FaultProxy(port, [size // 3, 2 * size // 3]) as proxy:
        plan.say(f"pushing {size // MIB} MiB")
        push = await run_command(pid, "push", str(model), "--no-check", "--server", f"127.0.0.1:{proxy.port}", "--json")
        sent, push_cuts = proxy.sent_bytes, proxy.cut_count
    async with FaultProxy(port, [size // 3, 2 * size // 3]) as proxy:
        plan.say(f"pulling {size // MIB} MiB")
        target = plan.folder / "pulled"
        pull = await run_command(pid, "pull", "large", str(target), "--server", f"127.0.0.1:{proxy.port}", "--json")
        received, pull_cuts = proxy.received_bytes, proxy.cut_count
    is_same = await asyncio.to_thread(
        lambda: digest(target / "1" / "weights.bin") == digest(model / "1" / "weights.bin")
    )
    result.must("upload_rss_mib", (max(push["server_rss"], pull["server_rss"]) - idle) / MIB, high=200)
    result.must("upload_client_rss_mib", max(push["client_rss"], pull["client_rss"]) / MIB, high=400)
    result.must("upload_cuts", min(push_cuts, pull_cuts), low=2)
    result.must("upload_wrong", 0 if is_same else 1, high=0)
    # Bytes in flight at a cut are sent again.
    result.must("upload_sent_ratio", max(sent, received) / size, high=1.1)
    result.details |= {
        "size_mib": size // MIB,
        "idle_rss_mib": round(idle / MIB),
        "push_s": round(push["seconds"], 1),
        "pull_s": round(pull["seconds"], 1),
        "digest": push["answer"]["digest"],
    }
    return result


async def run_command(server: int, *words: str) -> dict[str, Any]:
    """Run a command of `penstock model`; return its answer, and the peak memory of the command and of the server."""
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "model", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    telling = asyncio.create_task(asyncio.wait_for(process.communicate(), COMMAND_S))
    server_rss = client_rss = 0
    while not telling.done():
        server_rss = max(server_rss, psutil.Process(server).memory_info().rss)
        try:
            client_rss = max(client_rss, psutil.Process(process.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            pass
        await asyncio.wait({telling}, timeout=SAMPLE_S)
    said, complained = telling.result()
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: {complained.decode(errors='replace')[-500:]}")
    seconds = time.monotonic() - started
    return {"answer": json.loads(said), "server_rss": server_rss, "client_rss": client_rss, "seconds": seconds}


def write_large(folder: Path, size: int) -> None:
    write_model(folder, "model.py", CODE, task="tensor", **python_settings("x", "y", "FP32", [-1]))
    numbers = random.Random(size)
    with (folder / "1" / "weights.bin").open("wb") as weights:
        for _ in range(size // MIB):
            weights.write(numbers.randbytes(MIB))


def digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
