"""Ray Serve 2.60.0: REST and gRPC, raw bytes in and out.

What its documentation advises, and what was set:
- High throughput mode: `RAY_SERVE_ENABLE_HA_PROXY=1` (HAProxy, which its wheel brings, in place of the proxy in Python)
  and `RAY_SERVE_THROUGHPUT_OPTIMIZED=1` (replicas have their own HTTP and gRPC servers, code runs on the replica's main
  event loop, logs are buffered). One candidate of each search has Serve's own proxy, without those.
- Access logs off, log level WARNING, no metrics of HAProxy for each request, no dashboard, no usage statistics.
- `num_replicas`: two with one thread each, for two cores, and one with two threads; `max_ongoing_requests` so high that
  batches can fill.
- Blocking code off the event loop: models run in one thread of the replica. The no-op runs on the loop, as it takes
  less than the way to a thread.
- `@serve.batch` with `max_batch_size` and a small `batch_wait_timeout_s`. SRCNN is not batched: its work grows with the
  batch.
- HTTP: a Starlette request's body and a `Response` of bytes. gRPC: a service of one method with `BytesValue` as request
  and answer.
"""

import json
import secrets
import tempfile
from pathlib import Path

from benchmarks.peers.peer import HOST, MINILM, NOOP, SHARED, SRCNN, Assets, Launch, Setting, find_free_ports
from benchmarks.peers.raw import Candidates, RawPeer, describe_handler

TWO = {"replicas": 2, "threads": 1}
ONE = {"replicas": 1, "threads": 2}
ALIKE = {"batch": 32, "wait_s": 0.005, "alike": True}
SETTINGS: Candidates = {
    MINILM: {
        "2 replicas, 1 thread, no batching": TWO,
        "2 replicas, 1 thread, batches of 8 in 2 ms": {**TWO, "batch": 8, "wait_s": 0.002},
        "2 replicas, 1 thread, batches of 32 in 5 ms, like lengths together": TWO | ALIKE,
        "1 replica, 2 threads, batches of 32 in 5 ms, like lengths together": ONE | ALIKE,
        "2 replicas, 1 thread, no batching, Serve's own proxy": {**TWO, "haproxy": False},
    },
    SRCNN: {
        "2 replicas, 1 thread": TWO,
        "1 replica, 2 threads": ONE,
        "2 replicas, 1 thread, Serve's own proxy": {**TWO, "haproxy": False},
    },
    NOOP: {
        "1 replica, no batching": {"replicas": 1},
        "2 replicas, no batching": {"replicas": 2},
        "2 replicas, batches of 32 in 1 ms": {"replicas": 2, "batch": 32, "wait_s": 0.001},
        "1 replica, no batching, Serve's own proxy": {"replicas": 1, "haproxy": False},
    },
}


class RayServe(RawPeer):
    name = "ray_serve"
    title = "Ray Serve 2.60.0"
    grpc_method = "/peer.Model/Predict"
    route = "/"
    candidates = SETTINGS

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        http_port, grpc_port, metrics_port, stats_port = find_free_ports(4)
        # Ray's sockets are here, whose paths may have 107 bytes: `folder` may be too long. The server removes it.
        scratch = tempfile.mkdtemp(prefix="ray")
        given = {
            "http_port": http_port,
            "grpc_port": grpc_port,
            "scratch": scratch,
            "ready": str(folder.absolute() / "ready"),
            "replicas": setting.values["replicas"],
            "batch": setting.values.get("batch", 1),
            "wait_s": setting.values.get("wait_s", 0.0),
            "inline": workload == NOOP,
            "handler": describe_handler(workload, assets, setting.values),
        }
        environment = common_environment(scratch)
        if setting.values.get("haproxy", True):
            environment |= haproxy_environment(scratch, metrics_port, stats_port)
        targets = {"rest": f"{HOST}:{http_port}", "grpc": f"{HOST}:{grpc_port}"}
        return Launch(
            command=(str(python), str(Path(__file__).with_name("server.py")), json.dumps(given)),
            environment=environment,
            targets=targets,
            ready_url=f"http://{targets['rest']}/",
            stop_command=(str(python), str(SHARED / "leftovers.py"), scratch, scratch),
        )


def common_environment(scratch: str) -> dict[str, str]:
    token = Path(scratch, "auth_token")
    token.write_text(secrets.token_hex(32))
    return {
        "PYTHONPATH": f"{SHARED}:{Path(__file__).parent.absolute()}",  # Serve's processes import bytes_service
        "PEER_MARK": scratch,  # by this shared/leftovers.py finds all that belongs to this instance
        "RAY_AUTH_TOKEN_PATH": str(token),  # else Ray keeps one in the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def haproxy_environment(scratch: str, metrics_port: int, stats_port: int) -> dict[str, str]:
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{scratch}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{scratch}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": scratch,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{scratch}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{scratch}/metrics.sock",
    }


PEER = RayServe()
