"""Endless loops of the server run under supervision."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "penstock"
CLIENTS = ("cli", "client", "experiments")  # their loops end with the command or the call that they serve

# Loops that end with one connection, one request or one call; or that a supervised loop iterates over.
ALLOWED = {
    "telemetry/background.py": {"run": "the supervised loop"},
    "features/admin/manager_calls.py": {"watch": "one request", "_watch_leaders": "one request"},
    "features/admin/watch_rest.py": {"_wait_until_closed": "one connection"},
    "features/live/streams.py": {
        "_sample_forever": "the streams of one interval: a failure ends them, clients come again"
    },
    "endpoints/http/http_message.py": {"read_chunks": "one request"},
    "gateway/websocket/request_stream.py": {"run": "one connection", "_read": "one connection"},
    "manager/leading/elected_manager.py": {"follow": "a generator of the loop 'leader'"},
    "manager/manager.py": {"_deploy_repository": "one call: it ends when the repository is deployed"},
    "features/registry/model_cache.py": {"_lock_in_use": "one call"},
    "features/registry/sources.py": {"read": "one download"},
    "features/async_requests/async_requests.py": {"_finish": "one request"},
    "features/cache/flights.py": {"share": "one request"},
    "features/search/slices.py": {"run_in_slices": "one computation"},
    "serving/forwarded.py": {"run_forwarded": "one request"},
    "serving/serve.py": {"_run": "one request"},
    "features/sessions/ordered_sessions.py": {"_run": "one request"},
    "features/sessions/session_runs.py": {"transfer_out": "one session"},
    "storage/metadata/etcd.py": {
        "commit": "one call",
        "watch": "a generator of the loops 'election-...' and 'manager-store'",
        "_watch_at": "one connection",
    },
    "storage/metadata/following.py": {"follow": "a generator of the loops 'election-...' and 'manager-store'"},
    "wire/leader_search.py": {"follow": "a generator of the loop 'leader'"},
    "wire/manager_connection.py": {"_generate_requests": "one connection"},
    "wire/grpc_listener/grpc_server.py": {"_request_call": "one server: gRPC's own loop, rewritten"},
    "wire/leader_connection.py": {"call": "one call", "_check_leader": "one call"},
    "worker/attachment.py": {"_reports": "one connection"},
}


def endless_loops() -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE)
        if name.parts[0] in (*CLIENTS, "pb"):
            continue
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.AsyncFunctionDef):
                found |= {(str(name), function.name) for node in ast.walk(function) if is_endless(node)}
    return found


def is_endless(node: ast.AST) -> bool:
    awaits = (ast.Await, ast.AsyncFor, ast.AsyncWith)
    return (
        isinstance(node, ast.While)
        and isinstance(node.test, ast.Constant)
        and any(isinstance(inside, awaits) for inside in ast.walk(node))
    )


def test_every_endless_loop_is_supervised_or_has_a_reason() -> None:
    allowed = {(file, function) for file, functions in ALLOWED.items() for function in functions}
    assert endless_loops() == allowed
