"""The model for Triton's Python backend, which runs `1/model.py` in one process per instance."""

import json
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # Triton provides it

# Triton imports a link to this file in a repository, and hands no PYTHONPATH on.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "shared")]

from work import INPUTS, OUTPUTS, batch_run  # noqa: E402


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        options = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._input, self._output = INPUTS[config["name"]].name, OUTPUTS[config["name"]].name
        self._run = batch_run(config["name"], options)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run a batch, which Triton passes as requests of one row each."""
        import numpy as np

        rows = [pb_utils.get_input_tensor_by_name(request, self._input).as_numpy() for request in requests]
        found = self._run(rows[0] if len(rows) == 1 else np.concatenate(rows))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(self._output, found[index : index + 1])])
            for index in range(len(rows))
        ]
