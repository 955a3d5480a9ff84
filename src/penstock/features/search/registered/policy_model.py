"""Runs a registered policy in the policy's own process: loads its code, and passes requests to it.

The process is that of a Python model (engines/python), whose code is this module.
"""

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from penstock.engines.python.python_model import ModelContext, RequestContext

CODE_FILE = "policy.py"  # beside model.py
REQUEST, RANKING = "request", "ranking"  # the tensors of a call, each one JSON text


class PolicyModel:
    def __init__(self, context: "ModelContext") -> None:
        spec = importlib.util.spec_from_file_location("policy", context.folder / CODE_FILE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._rank = module.rank

    def infer(self, inputs: dict[str, Any], context: "RequestContext") -> dict[str, Any]:
        request = json.loads(inputs[REQUEST][0])
        found = self._rank(request["candidates"], request["context"])
        return {RANKING: np.array([json.dumps(found, allow_nan=False).encode()], dtype=object)}
