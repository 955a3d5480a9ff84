"""Returns its inputs, its context, and the names of the modules that its process has imported."""

import sys

import numpy as np

NOT_OURS = (
    "pydantic",
    "structlog",
    "zmq",
    "grpc",
    "onnxruntime",
    "penstock.worker",
    "penstock.engines.python.python_engine",
)


class Model:
    def __init__(self, context):
        self.context = context
        self.before = None

    def infer(self, inputs, context):
        how = context.parameters.get("how", "echo")
        if how == "echo":
            assert all(array.flags.writeable and array.flags.aligned for array in inputs.values())
            return dict(inputs)
        if how == "before":
            before, self.before = self.before, inputs["X"]
            return {"X": inputs["X"] if before is None else before}
        told = {
            "context": f"{self.context.model} {self.context.version} {self.context.folder.name} "
            f"{self.context.instance} {self.context.threads} {self.context.device}",
            "request": f"{context.request_id} {context.seq_no} {sorted(context.parameters.items())} {context.session}",
            "imports": " ".join(name for name in NOT_OURS if name in sys.modules),
        }
        return {"X": np.array([told[how]], dtype=object)}
