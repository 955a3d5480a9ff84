"""Returns a session's state and the hooks that were called; two of its parameters make hooks fail."""

import numpy as np


class Model:
    def __init__(self):
        self.calls = []

    def start_session(self, session_id):
        if session_id == "unwelcome":
            raise RuntimeError("not you")
        self.calls.append(f"start {session_id}")

    def end_session(self, session_id, reason):
        self.calls.append(f"end {session_id} {reason}")
        if session_id == "clingy":
            raise RuntimeError("stay")

    def infer(self, inputs, context):
        context.session["count"] = context.session.get("count", 0) + 1
        if context.parameters.get("raise"):
            raise RuntimeError("as told")
        calls, self.calls = self.calls, []
        return {"COUNT": np.array([context.session["count"]], np.int32), "CALLS": np.array(calls, dtype=object)}
