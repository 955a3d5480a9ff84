"""The examples work when they are run from a shell."""

import os
import subprocess
import sys

import pytest

from tests.servers import ROOT


@pytest.mark.parametrize("options", [[], ["--etcd"]])
def test_a_cluster_of_three_hosts_runs(options: list[str]) -> None:
    """Network namespaces need root; without them this test fails instead of being skipped."""
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
