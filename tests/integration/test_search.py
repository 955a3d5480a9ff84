"""Search on a server: conditions, a registered policy, semantic ranking, and their commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]
CHAT = """
from penstock.core.packets import PacketAnswer

class Model:
    def __init__(self, context):
        self.name = context.model

    def infer(self, packet, context):
        return PacketAnswer({"model": self.name, "messages": len(packet.json()["messages"])})
"""
POLICY = "policies.search.object-det-selector:v0.0.01-stable"
POLICY_CODE = """
def rank(candidates, context):
    return [each["id"] for each in sorted(candidates, key=lambda each: each["model"], reverse=True)]
"""


def add_model(repository: Path, name: str, algorithm: str, description: str) -> None:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(CHAT)
    metadata = f"{{algorithmType: {algorithm}, model: {name}-2}}"
    text = f"engine: python\npython: {{takes_packets: true}}\nmetadata: {metadata}\ndescription: {description}\n"
    (folder / "model.yaml").write_text(text)


def seed_query(model: str = "gpt") -> dict[str, Any]:
    algorithm = {"variable": "component.metadata.algorithmType", "operator": "==", "value": "llm"}
    name = {"variable": "component.metadata.model", "operator": "LIKE", "value": model}
    filters = {
        "clusterQuery": {"variable": "id", "operator": "==", "value": "cluster-123"},
        "blockQuery": {"logicalOperator": "AND", "conditions": [algorithm, name]},
    }
    rule = {
        "executionMode": "code",
        "policyRuleURI": POLICY,
        "settings": {},
        "parameters": {"filterRule": {"matchType": "block", "filter": filters}},
    }
    return {"body": {"values": {"matchType": "cluster", "rankingPolicyRule": {"values": rule}}}}


def penstock(server: ServerProcess, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "penstock", *arguments, "--server", server.http_url.removeprefix("http://")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def search(server: ServerProcess, query: Any, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.http_url}/v1/search", json={"query": query, **body}, timeout=30)
    found: dict[str, Any] = answer.json()
    assert answer.status_code == 200, found
    return found


def change_model(server: ServerProcess, name: str, change: str) -> None:
    answer = httpx.post(f"{server.http_url}/v2/repository/models/{name}/{change}", timeout=60)
    assert answer.status_code == 200, answer.text


def test_search_finds_ranks_and_explains_blocks(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    add_model(repository, "tiny-gpt", "llm", "writes English stories")
    add_model(repository, "small-gpt", "llm", "answers questions about the weather")
    add_model(repository, "yolo", "detection", "finds cars and people in pictures")
    (repository / "minilm").symlink_to(ROOT / "models" / "minilm")
    settings = {"PENSTOCK_CLUSTER__ID": "cluster-123"}
    with ServerProcess(repository, tmp_path / "server", environment=settings) as server:
        _conditions(server)
        _registered_policy(server, tmp_path)
        _new_block(server, repository)
        found = search(
            server, {"user_query": "an image with traffic", "rankingPolicyRule": {"policyRuleURI": "semantic"}}
        )
        assert found["blocks"][0]["model"] == "yolo"
        assert (tmp_path / "server" / "data" / "search-vectors.sqlite").exists()


def _conditions(server: ServerProcess) -> None:
    found = search(
        server, {"filter": {"blockQuery": {"variable": "metadata.model", "operator": "LIKE", "value": "GPT"}}}
    )
    assert sorted(each["model"] for each in found["blocks"]) == ["small-gpt", "tiny-gpt"]
    assert (found["matched"], found["total"]) == (2, 4)
    listed = penstock(server, "search", "--where", "metadata.algorithmType == detection", "--explain")
    assert "yolo:1" in listed
    assert "metadata.algorithmType == 'detection'; has \"llm\"" in listed
    refused = httpx.post(f"{server.http_url}/v1/search", json={"query": {"matchType": "node"}})
    assert refused.status_code == 400
    assert "cluster, block" in refused.text


def _registered_policy(server: ServerProcess, folder: Path) -> None:
    unknown = httpx.post(f"{server.http_url}/v1/search", json={"query": seed_query()})
    assert unknown.status_code == 400
    assert POLICY in unknown.text
    file = folder / "policy.py"
    file.write_text(POLICY_CODE)
    assert "pushed" in penstock(server, "policy", "push", POLICY, str(file))
    assert json.loads(penstock(server, "policy", "list", "--json"))[0]["name"] == POLICY

    def ranked() -> list[str]:
        answer = httpx.post(f"{server.http_url}/v1/search", json={"query": seed_query()}, timeout=30)
        return [each["model"] for each in answer.json().get("blocks", [])]

    eventually(lambda: ranked() == ["tiny-gpt", "small-gpt"], "the policy ranks")
    _run_the_program(server)
    file.write_text(POLICY_CODE + "\n# changed")
    assert "another version" in penstock(server, "policy", "push", POLICY, str(file), code=2)
    penstock(server, "policy", "delete", POLICY)
    eventually(lambda: not ranked(), "the policy is gone")


def _new_block(server: ServerProcess, repository: Path) -> None:
    """Deploy a block while a session searches: others find it, and the session keeps its block."""
    speech = {"variable": "metadata.algorithmType", "operator": "==", "value": "speech"}
    query = {"filter": {"blockQuery": speech}, "rankingPolicyRule": {"policyRuleURI": "random"}}
    add_model(repository, "first-voice", "speech", "speaks")
    change_model(server, "first-voice", "load")

    def answer_of(session: str) -> str:
        packet = {"session_id": session, "selection_query": query, "data": {"messages": []}}
        answer = httpx.post(f"{server.http_url}/v1/infer", json=packet, timeout=30)
        return str(answer.json()["data"]["model"]) if answer.status_code == 200 else answer.text

    eventually(lambda: answer_of("old") == "first-voice", "a session finds the first block")
    add_model(repository, "second-voice", "speech", "speaks too")
    change_model(server, "second-voice", "load")
    sessions = (f"new-{number}" for number in range(10_000))

    def is_found() -> bool:
        assert answer_of("old") == "first-voice"
        return answer_of(next(sessions)) == "second-voice"

    eventually(is_found, "another session finds the new block")
    assert sorted(each["model"] for each in search(server, query)["blocks"]) == ["first-voice", "second-voice"]
    for name in ("first-voice", "second-voice"):
        change_model(server, name, "unload")


def _run_the_program(server: ServerProcess) -> None:
    """Run the example: the policy ranks, a packet reaches the block, and the session keeps it."""
    environment = {**os.environ, "SERVER_ADDRESS": server.grpc, "CLUSTER_ID": "cluster-123"}
    command = [sys.executable, str(ROOT / "examples" / "global" / "search.py")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
        lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
        assert lines["Session ID"] == "sess-12345"
        assert json.loads(lines["Data"]) == {"model": "tiny-gpt", "messages": 4}
    assert server.metric("penstock_search_resolutions_total", outcome="searched") == 1
    assert server.metric("penstock_search_resolutions_total", outcome="cached") == 1
