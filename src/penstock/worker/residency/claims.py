"""What the workers of a machine are about to load onto its GPUs, so that each counts what the others will take.

A claim is a file that is locked for as long as its process loads: that of one that died counts no more.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from penstock.telemetry.devices import Gpus, NvidiaGpu
from penstock.worker.residency.steps import DeviceRoom

log = structlog.get_logger()
LOCK = "lock"
UNKNOWN = 2**62  # free where the driver does not tell: nothing is refused for that


class DeviceClaims:
    """Of one worker, which loads one block at a time."""

    def __init__(self, gpus: Gpus, folder: Path | None = None) -> None:
        self._gpus = gpus
        self._folder = folder or Path(tempfile.gettempdir()) / f"penstock-gpus-{os.getuid()}"
        self._held: tuple[int, Path] | None = None

    def room(self, device: str) -> DeviceRoom:
        gpu = self._gpus.find(device)
        return DeviceRoom(UNKNOWN) if gpu is None else self._room(gpu)

    def claim(self, device: str, size_bytes: int) -> bool:
        """False: there is no room any more, or somebody else is just claiming some: look again later."""
        assert self._held is None, "another block is being loaded"
        gpu = self._gpus.find(device) if device else None
        if gpu is None:
            return True
        try:
            with self._locked(gpu) as is_mine:
                if not is_mine:
                    return False
                self._forget_dead(gpu)
                if self._room(gpu).free_bytes < size_bytes:
                    return False
                self._write(self._folder / gpu.uuid / str(os.getpid()), size_bytes)
        except OSError as error:  # then only what is in use already counts
            log.warning("device_not_claimed", device=device, error=str(error))
        return True

    def release(self) -> None:
        if self._held is not None:
            descriptor, file = self._held
            self._held = None
            with suppress(OSError):
                file.unlink()
            os.close(descriptor)

    @contextmanager
    def _locked(self, gpu: NvidiaGpu) -> Iterator[bool]:
        """Nobody waits: this is done on the event loop."""
        folder = self._folder / gpu.uuid
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} is another user's")
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _lock(descriptor)
        finally:
            os.close(descriptor)

    def _write(self, file: Path, size_bytes: int) -> None:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(descriptor, str(size_bytes).encode())
        _lock(descriptor)
        self._held = descriptor, file

    def _room(self, gpu: NvidiaGpu) -> DeviceRoom:
        free_bytes, claimed_bytes = self._gpus.free_bytes(gpu), self._claimed_bytes(gpu)
        if free_bytes is None:
            return DeviceRoom(UNKNOWN)
        return DeviceRoom(max(0, free_bytes - claimed_bytes), claimed_bytes)

    def _claimed_bytes(self, gpu: NvidiaGpu) -> int:
        """By others that live."""
        total = 0
        with suppress(OSError):
            for file in (self._folder / gpu.uuid).iterdir():
                if file.name not in (LOCK, str(os.getpid())):
                    total += _claimed(file)
        return total

    def _forget_dead(self, gpu: NvidiaGpu) -> None:
        """Only while the lock is held: nobody begins to claim meanwhile."""
        for file in (self._folder / gpu.uuid).iterdir():
            if file.name != LOCK and not _claimed(file):
                file.unlink(missing_ok=True)


def _claimed(file: Path) -> int:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it was released
        return 0
    try:
        return 0 if _lock(descriptor) else int(os.read(descriptor, 32) or b"0")
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
