"""Yields COUNT answers, and records its progress in a file beside it."""

import os

import numpy as np


class Model:
    def __init__(self, context):
        self.notes = context.folder / "notes"

    def infer(self, inputs, context):
        if context.parameters.get("as") == "number":
            return 7
        if context.parameters.get("as") == "list":
            return [answer(index) for index in range(int(inputs["COUNT"][0]))]
        if context.parameters.get("as") == "dict":
            return answer(0)
        return self.answers(int(inputs["COUNT"][0]), context)

    def answers(self, count, context):
        try:
            for index in range(count):
                if index == context.parameters.get("raise_at"):
                    raise RuntimeError("no more")
                if index == context.parameters.get("exit_at"):
                    os._exit(9)
                if index == context.parameters.get("wrong_at"):
                    yield {"VALUE": np.array([index], np.float32)}
                self.note(f"{context.request_id}:{index}")
                yield answer(index)
            self.note(f"{context.request_id}:done")
        except GeneratorExit:
            self.note(f"{context.request_id}:closed")
            raise

    def end_session(self, session_id, reason):
        self.note(f"{session_id}:{reason}")

    def note(self, text):
        with self.notes.open("a") as notes:
            notes.write(f"{text}\n")


def answer(index):
    return {"INDEX": np.array([index], np.int32)}
