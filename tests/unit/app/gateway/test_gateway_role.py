"""Imports of a role's process: a gateway imports no models, tasks or engines."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import penstock.app.gateway.gateway_role, penstock.gateway, penstock.serving, penstock.router
for package in (penstock.gateway, penstock.serving, penstock.router):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
libraries = ("onnx", "onnxruntime", "openvino", "torch", "tokenizers")
apart = ("penstock.tasks", "penstock.engines", "penstock.models", *libraries)
print(*(name for name in sys.modules if name.startswith(apart)))
"""


def test_a_gateway_loads_neither_models_nor_tasks_nor_engines() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == []
