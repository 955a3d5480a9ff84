"""Does what the parameter `do` says, most of which a model should not do."""

import ctypes
import os
import signal
import sys
import time

import numpy as np

from penstock.core.errors import InvalidTensor


class Model:
    def __init__(self, context):
        self.folder = context.folder
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

    def do_raise(self, answer):
        raise ValueError("the moon is not full")

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

    def do_orphan(self, answer):
        """Ends, but leaves a process that holds all that it had open."""
        child = os.fork()
        if child == 0:
            time.sleep(120)
            os._exit(0)
        (self.folder / "orphan").write_text(str(child))
        os._exit(5)

    def do_break(self, answer):
        (self.folder / "broken").touch()
        os._exit(6)

    def do_wait(self, answer):
        (self.folder / "waiting").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)
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
