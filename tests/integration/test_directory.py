"""A directory as a process: the documented curl calls, keys, TLS, two servers that register, and its absence."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.core.errors import Forbidden, NotFound, Unauthenticated, Unavailable
from penstock.features.directory.directory_client import DirectoryClient
from tests.directory_bed import DirectoryProcess, curl_commands, run_curl
from tests.servers import ROOT, log_lines, write_identity
from tests.tls import TestAuthority

PAGE = ROOT / "docs/directory.md"
QUOTAS = {"requests_per_second_total": 100.0, "requests_per_session_id": 1000}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectoryProcess]:
    with DirectoryProcess(tmp_path_factory.mktemp("directory")) as running:
        yield running


def penstock(*arguments: str) -> str:
    command = [sys.executable, "-m", "penstock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_documented_curl_call_works_as_written(directory: DirectoryProcess) -> None:
    commands = [each.replace("<server-url>", directory.url) for each in curl_commands(PAGE)]
    assert len(commands) == 9
    status, made = run_curl(commands[0])
    assert (status, made["inference_server_name"]) == (201, "inference-server-us-east-1")
    assert made["inference_server_metadata"]["quota_management_data"]["requests_per_session_id"] == 1000
    known = "d4e8c3f0-7c8d-4a2e-b23e-2d4b6789abcd"
    commands = [each.replace(known, made["inference_server_id"]) for each in commands]
    found = [run_curl(each) for each in commands[1:]]
    assert [status for status, _ in found] == [200] * 8
    (_, shown), (_, moved), (_, tagged), *queries, (_, deleted) = found
    assert shown == made
    assert (moved["inference_server_metadata"]["region"], moved["inference_server_metadata"]["provider"]) == (
        "us-west-2", "Google Cloud",
    )  # fmt: skip
    assert tagged["inference_server_tags"] == ["NLP", "Transformer", "BERT", "LLM"]
    assert [len(each) for _, each in queries] == [0, 0, 1, 1]  # it has no GPU and is at Google by now
    assert deleted == {"deleted": made["inference_server_id"]}
    status, gone = run_curl(commands[1])
    assert (status, "has no inference server" in gone["error"]) == (404, True)


async def test_malformed_requests_get_typed_errors(directory: DirectoryProcess) -> None:
    client, nested = DirectoryClient(directory.url), json.loads("[" * 400 + "]" * 400)
    for method, path, body, message in (
        ("POST", "/inference_servers", {"$where": "1"}, "operator '$where' is not supported"),
        ("POST", "/inference_servers", {"a": {"$regex": "("}}, "RE2 syntax"),
        (
            "POST",
            "/inference_servers",
            {"a": nested},
            "deeper than 200 levels",
        ),
        ("POST", "/inference_server", {"unknown": 1}, "unknown field 'unknown'"),
        ("POST", "/inference_server", [], "must be a JSON object"),
        ("PUT", "/inference_server/none", {"$set": {"a": 1}}, "has no inference server 'none'"),
        ("POST", "/inference_server?lease_s=x", {}, "lease_s must be a number above 0"),
        ("PUT", "/clusters/c", {"blocks": []}, "needs a lease"),
        ("GET", "/nothing", None, "there is no /nothing"),
    ):
        with pytest.raises(Exception, match=re.escape(message)):
            await client.call(method, path, body)


def test_the_command_line_registers_lists_changes_and_deletes(directory: DirectoryProcess) -> None:
    at = ("--directory", directory.url)
    said = penstock("directory", "register", "https://eu.example.com", "--name", "eu", "--tag", "NLP", *at)
    server_id = said.removeprefix("registered ").strip()
    assert "https://eu.example.com" in penstock("directory", "list", "--query", '{"inference_server_tags": "NLP"}', *at)
    penstock("directory", "update", server_id, '{"$set": {"inference_server_name": "eu-2"}}', *at)
    assert '"inference_server_name": "eu-2"' in penstock("directory", "show", server_id, *at)
    penstock("directory", "delete", server_id, *at)
    assert "no inference server matches" in penstock("directory", "list", *at)


async def test_keys_own_records_and_tls_protects_them(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path / "certificates")
    environment = {f"PENSTOCK_TLS__{name.upper()}": path for name, path in authority.settings()["tls"].items()}
    with DirectoryProcess(tmp_path, environment=environment) as running:
        assert running.url.startswith("https://")
        keys = [_create_key(running, name, scope) for name, scope in _KEYS]
        mine, other, admin = (DirectoryClient(running.url, key, authority.files()) for key in keys)
        with pytest.raises(Unauthenticated):
            await DirectoryClient(running.url, "", authority.files()).find({})
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            await DirectoryClient(running.url, keys[0]).find({})
        server_id = (await mine.register({"inference_server_name": "a"}))["inference_server_id"]
        with pytest.raises(Forbidden, match="belongs to another key"):
            await other.delete(server_id)
        assert [each["inference_server_id"] for each in await other.find({})] == [server_id]
        await admin.delete(server_id)
        with pytest.raises(NotFound):
            await mine.get(server_id)


_KEYS = (("mine", "inference"), ("other", "inference"), ("boss", "admin"))


def _create_key(running: DirectoryProcess, name: str, scope: str) -> str:
    made = penstock("key", "create", name, "--scope", scope, "--server", str(running.data_dir), "--json")
    found = re.search(r"psk_[A-Za-z0-9_-]+", made)
    assert found, made
    return found[0]


async def test_two_servers_register_renew_and_leave_and_survive_a_lost_directory(tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "identity", "FP32")
    with DirectoryProcess(tmp_path) as running:
        client = DirectoryClient(running.url)
        first = _start(tmp_path, running, 1)
        with _start(tmp_path, running, 2) as second:
            await _until_listed(client, ["https://server-1", "https://server-2"])
            (found,) = await client.find({"inference_server_public_url": "https://server-1"})
            assert found["inference_server_metadata"] == {"region": "r1", "quota_management_data": QUOTAS}
            assert found["inference_server_tags"] == ["t1"]
            first.process.kill()  # it cannot remove itself: its lease ends
            await _until_listed(client, ["https://server-2"])
            running.kill()
            await until_seen(lambda: _has_logged(second, "directory_failed"), "the server has noticed", 30.0)
            assert second.get("/v2/health/ready") is not None  # it serves on
            running.start()
            await _until_listed(client, ["https://server-2"])
            assert not second.tracebacks()
        first.__exit__(None, None, None)
        await _until_listed(client, [])
        assert not [line for line in log_lines(running.log) if line.get("level") == "error"]


async def test_clusters_find_the_blocks_of_others(tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "identity", "FP32")
    with DirectoryProcess(tmp_path) as running:
        own = {"lease_s": 3, "url": running.url}
        settings = [{"directory": own, "cluster": {"id": f"c{n}", "metadata": {"region": f"r{n}"}}} for n in range(2)]
        with (
            ServerProcess(tmp_path / "models", tmp_path / "s0", "--gateways", "2", settings=settings[0]),
            ServerProcess(tmp_path / "models", tmp_path / "s1", settings=settings[1]) as second,
        ):
            client = DirectoryClient(running.url)
            await _until_blocks(client, {"c0", "c1"})
            (found,) = await client.find_blocks({"cluster_id": "c0", "task": "tensor"})
            assert (found["model"], found["cluster_metadata"], found["state"]) == (
                "identity",
                {"region": "r0"},
                "ready",
            )
            assert len(found["grpc_addresses"]) == 2
            await until_seen(lambda: len(_search(second)["blocks"]) == 2, "both clusters are searched", 60.0)
            blocks = {each["cluster_id"]: each["is_callable"] for each in _search(second)["blocks"]}
            assert blocks == {"c0": False, "c1": True}
            far = {"clusterQuery": {"variable": "id", "operator": "==", "value": "c0"}}
            listed = penstock("search", "--query", json.dumps({"filter": far}), "--server", second.http_url, "--json")
            (shown,) = json.loads(listed)["blocks"]
            assert (shown["cluster_id"], shown["is_callable"], shown["model"]) == ("c0", False, "identity")
            packet = {"session_id": "s", "selection_query": {"filter": far}, "data": {"inputs": {"x": [[1.0]]}}}
            async with httpx.AsyncClient(base_url=second.http_url, timeout=30) as http:
                refused = await http.post("/v1/infer", json=packet)
            assert (refused.status_code, refused.headers["penstock-code"]) == (404, "no_match")
            assert "in the cluster c0, and this gateway cannot call them" in refused.text
            named = {"session_id": "s", "block_id": shown["block_id"], "data": {"inputs": {"x": [[1.0]]}}}
            async with httpx.AsyncClient(base_url=second.http_url, timeout=30) as http:
                refused = await http.post("/v1/infer", json=named)
            assert (refused.status_code, refused.headers["penstock-code"]) == (421, "other_cluster")
            assert f"is served by the cluster 'c0', at {found['grpc_addresses'][0]} or " in refused.text
            assert not second.tracebacks()
        await _until_blocks(client, set())


def _search(server: ServerProcess) -> Any:
    return httpx.post(f"{server.http_url}/v1/search", json={}, timeout=30).json()


async def _until_blocks(client: DirectoryClient, clusters: set[str]) -> None:
    async with asyncio.timeout(60.0):
        while True:
            if {each["cluster_id"] for each in await client.find_blocks({})} == clusters:
                return
            await asyncio.sleep(0.1)


def _start(folder: Path, running: DirectoryProcess, number: int) -> ServerProcess:
    own = {"metadata": {"region": f"r{number}"}, "tags": [f"t{number}"], "lease_s": 3}
    settings: dict[str, Any] = {"quotas": QUOTAS, "directory": own}
    flags = ("--directory", running.url, "--public-url", f"https://server-{number}")
    return ServerProcess(folder / "models", folder / f"server-{number}", *flags, settings=settings)


async def _until_listed(client: DirectoryClient, urls: list[str]) -> None:
    async with asyncio.timeout(60.0):
        while True:
            found = await client.find({})
            if sorted(each["inference_server_public_url"] for each in found) == urls:
                return
            await asyncio.sleep(0.1)


def _has_logged(server: ServerProcess, event: str) -> bool:
    return any(line["event"] == event for line in log_lines(server.log))
