"""The examples do what they say, from a shell."""

import os
import subprocess
import sys

import pytest

from tests.servers import ROOT


@pytest.mark.parametrize("options", [[], ["--etcd"]])
def test_a_cluster_of_three_hosts(options: list[str]) -> None:
    """Network namespaces need root; where there are none this fails, rather than passing by."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PENSTOCK": f"{sys.prefix}/bin/penstock"}
    ran = subprocess.run(
        [ROOT / "examples/cluster/run", *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("[2.0, 4.0, 6.0]") == 2 + len(options), ran.stdout
    assert {"h1.manager", "h2.gateway-0", "h2.worker-0", "h3.worker-0", "h3.worker-1"} <= set(ran.stdout.split())
