"""Claims GPU memory before a load, so that two workers on a machine do not both count on the same free memory.

A claim is a file that the claiming process locks while it loads, so the claim of a dead process does not count.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from penstock.telemetry.gpus import Gpus, NvidiaGpu
from penstock.worker.residency.residency_actions import DeviceRoom

log = structlog.get_logger()
LOCK = "lock"
UNKNOWN = 2**62  # free memory if the driver does not report it, so that no claim is refused


class DeviceClaims:
    """Claims GPU memory for one worker, which loads one block at a time."""

    def __init__(self, gpus: Gpus, folder: Path | None = None) -> None:
        self._gpus = gpus
        self._folder = folder or Path(tempfile.gettempdir()) / f"penstock-gpus-{os.getuid()}"
        self._held_claim: tuple[int, Path] | None = None

    def free_room(self, device: str) -> DeviceRoom:
        gpu = self._gpus.find(device)
        return DeviceRoom(UNKNOWN) if gpu is None else self._free_room(gpu)

    def claim(self, device: str, size_bytes: int) -> bool:
        """Claim memory on a GPU.

        Return False if too little memory is free, or another worker is making a claim; the caller should try again.
        """
        assert self._held_claim is None, "another block is being loaded"
        gpu = self._gpus.find(device) if device else None
        if gpu is None:
            return True
        try:
            with self._try_lock_claims(gpu) as is_mine:
                if not is_mine:
                    return False
                self._delete_dead_claims(gpu)
                if self._free_room(gpu).free_bytes < size_bytes:
                    return False
                self._write_claim(self._folder / gpu.uuid / str(os.getpid()), size_bytes)
        except OSError as error:  # without claims, only memory that is already in use counts
            log.warning("device_claim_failed", device=device, error=str(error))
        return True

    def release(self) -> None:
        if self._held_claim is not None:
            descriptor, file = self._held_claim
            self._held_claim = None
            with suppress(OSError):
                file.unlink()
            os.close(descriptor)

    @contextmanager
    def _try_lock_claims(self, gpu: NvidiaGpu) -> Iterator[bool]:
        """Lock the claims on the GPU, and yield True; if another process holds the lock, yield False.

        This method does not wait for the lock, because it runs on the event loop.
        """
        folder = self._folder / gpu.uuid
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} belongs to another user")
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _write_claim(self, file: Path, size_bytes: int) -> None:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(descriptor, str(size_bytes).encode())
        _try_lock(descriptor)
        self._held_claim = descriptor, file

    def _free_room(self, gpu: NvidiaGpu) -> DeviceRoom:
        free_bytes, claimed_bytes = self._gpus.read_free_bytes(gpu), self._claimed_bytes(gpu)
        if free_bytes is None:
            return DeviceRoom(UNKNOWN)
        return DeviceRoom(max(0, free_bytes - claimed_bytes), claimed_bytes)

    def _claimed_bytes(self, gpu: NvidiaGpu) -> int:
        total = 0
        with suppress(OSError):
            for file in (self._folder / gpu.uuid).iterdir():
                if file.name not in (LOCK, str(os.getpid())):
                    total += _read_claim(file)
        return total

    def _delete_dead_claims(self, gpu: NvidiaGpu) -> None:
        """Delete the claims of dead processes. The caller must hold the lock of the claims."""
        for file in (self._folder / gpu.uuid).iterdir():
            if file.name != LOCK and not _read_claim(file):
                file.unlink(missing_ok=True)


def _read_claim(file: Path) -> int:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it was released
        return 0
    try:
        return 0 if _try_lock(descriptor) else int(os.read(descriptor, 32) or b"0")
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
