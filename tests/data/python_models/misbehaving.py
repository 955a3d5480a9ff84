"""Does what the parameter `do` says, most of which a model should not do."""

import asyncio
import ctypes
import mmap
import os
import signal
import stat
import sys
import threading
import time

import numpy as np

from penstock.core.errors import InvalidTensor

MIB = 1024 * 1024


class Model:
    def __init__(self, context):
        self.folder = context.folder
        self.kept = []
        if (self.folder / "broken").exists():
            raise RuntimeError("it is broken")

    def infer(self, inputs, context):
        answer = {"Y": inputs["X"] * 2, "PID": np.array([os.getpid()], np.int64)}
        do = context.parameters.get("do", "")
        return getattr(self, f"do_{do}")(answer) if do else answer

    def close(self):
        while (self.folder / "stubborn").exists():
            time.sleep(0.01)

    # --- wrong answers

    def do_miss(self, answer):
        del answer["Y"]
        return answer

    def do_add(self, answer):
        return {**answer, "Z": answer["Y"]}

    def do_widen(self, answer):
        return {**answer, "Y": answer["Y"].astype(np.float64)}

    def do_use_complex(self, answer):
        return {**answer, "Y": answer["Y"].astype(np.complex64)}

    def do_reshape(self, answer):
        return {**answer, "Y": answer["Y"].reshape(1, -1)}

    def do_give_list(self, answer):
        return {**answer, "Y": answer["Y"].tolist()}

    def do_give_numbers(self, answer):
        return {**answer, "Y": np.array([1, None], dtype=object)}

    def do_give_nothing(self, answer):
        return None

    # --- failures

    def do_fill_the_gpu(self, answer):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    def do_raise(self, answer):
        raise ValueError("the moon is not full")

    def do_raise_at_length(self, answer):
        raise ValueError("水" * 10_000)

    def do_cancel(self, answer):
        """Raise a BaseException that is not an Exception."""
        raise asyncio.CancelledError

    def do_refuse(self, answer):
        raise InvalidTensor("X must not be negative")

    def do_exit(self, answer):
        print("goodbye", file=sys.stderr)
        os._exit(3)

    def do_leave(self, answer):
        sys.exit(4)

    def do_kill(self, answer):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_segfault(self, answer):
        ctypes.string_at(0)

    def do_hang(self, answer):
        time.sleep(3600)

    def do_spin(self, answer):
        while True:
            pass

    def do_abort(self, answer):
        os.abort()

    def do_exit_in_thread(self, answer):
        threading.Thread(target=os._exit, args=(8,)).start()
        time.sleep(3600)

    def do_leave_a_thread(self, answer):
        threading.Thread(target=time.sleep, args=(3600,)).start()
        sys.exit(4)

    def do_recurse(self, answer):
        return self.do_recurse(answer)

    def do_hook(self, answer):
        sys.excepthook = lambda *_: os._exit(9)
        threading.excepthook = lambda *_: os._exit(9)
        raise ValueError("the moon is not full")

    def do_close_standard(self, answer):
        os.closerange(0, 3)
        return answer

    def do_close_everything(self, answer):
        os.closerange(0, 1024)
        return answer

    def do_lose_socket(self, answer):
        for fd in sockets():
            os.close(fd)
        time.sleep(3600)

    def do_talk_nonsense(self, answer):
        for fd in sockets():
            os.write(fd, b"\xff" * 64)
        time.sleep(3600)

    def do_orphan(self, answer):
        """End, but leave child processes that hold all open files of the model."""
        for name, has_own_group in (("orphan", False), ("stray", True)):
            child = os.fork()
            if child == 0:
                if has_own_group:
                    os.setsid()
                (self.folder / f"{name}.new").write_text(str(os.getpid()))
                (self.folder / f"{name}.new").rename(self.folder / name)
                time.sleep(120)
                os._exit(0)
            while not (self.folder / name).exists():
                time.sleep(0.01)
        os._exit(5)

    def do_fork_and_hang(self, answer):
        os.fork()
        time.sleep(3600)

    def do_fork_and_return(self, answer):
        os.fork()
        return answer

    def do_fork_and_raise(self, answer):
        if os.fork() == 0:
            raise RuntimeError("the child's")
        time.sleep(0.2)
        return answer

    # --- memory

    def do_leak(self, answer):
        self.kept.append(np.ones(8 * MIB, np.uint8))
        return answer

    def do_hoard(self, answer):
        while True:
            self.kept.append([0] * 1000)

    def do_hoard_arrays(self, answer):
        while True:
            self.kept.append(np.ones(MIB, np.uint8))

    def do_ask_for_too_much(self, answer):
        return np.empty(2**50, np.uint8)

    def do_wrap(self, answer):
        try:
            return self.do_ask_for_too_much(answer)
        except MemoryError as error:
            raise KeyError("weights") from error

    def do_abort_in_library(self, answer):
        ctypes.CDLL("libstdc++.so.6")._Znwm(ctypes.c_size_t(2**50))

    def do_share(self, answer):
        """Use memory that no limit of the process counts."""
        while True:
            shared = mmap.mmap(-1, 8 * MIB)
            shared.write(b"x" * 8 * MIB)
            self.kept.append(shared)
            time.sleep(0.01)

    def do_breed(self, answer):
        """Use memory in processes that are each within the limit."""
        for _ in range(4):
            if os.fork() == 0:
                self.kept.append(np.ones(100 * MIB, np.uint8))
                time.sleep(3600)
        time.sleep(3600)

    def do_copy(self, answer):
        """Fork processes that share the existing memory, which counts once."""
        self.kept.append(np.ones(100 * MIB, np.uint8))
        children = []
        for _ in range(4):
            children.append(os.fork())
            if children[-1] == 0:
                self.kept[-1].sum()
                time.sleep(3600)
        time.sleep(1)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.kept.clear()
        return answer

    def do_break(self, answer):
        (self.folder / "broken").touch()
        os._exit(6)

    def do_wait(self, answer):
        (self.folder / "waiting").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return answer

    def do_linger(self, answer):
        time.sleep(0.5)
        return answer

    # --- output

    def do_print(self, answer):
        print("to stdout: é")
        print("to stderr", file=sys.stderr)
        print(f"read {sys.stdin.read()!r} from stdin")
        os.write(1, b"\xff without an end")
        return answer

    def do_flood(self, answer):
        for index in range(20_000):
            print("line", index)
        sys.stderr.write("x" * 1_000_000 + "\n")
        return answer

    def do_print_garbage(self, answer):
        for fd in (1, 2):
            os.write(fd, os.urandom(MIB) + b'\n{"event": "not ours"}\n')
        return answer

    def do_print_much(self, answer):
        """Print more than a pipe holds, with and without line ends."""
        for fd in (1, 2):
            for _ in range(8):
                os.write(fd, b"so much to say\n" * (MIB // 16))
            os.write(fd, b"x" * MIB)
        return answer


def sockets():
    found = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    return [fd for fd in found if stat.S_ISSOCK(os.fstat(fd).st_mode)]
