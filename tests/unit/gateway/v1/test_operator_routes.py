"""Metrics, health, status and the OpenAPI document."""

import re

import pytest

JSON = "application/json"


@pytest.mark.parametrize(
    "accept", [None, "*/*", "text/plain", "application/json;q=0.4, text/plain", "application/xml", ";;q"]
)
async def test_metrics_are_served_as_text(served, client, accept):
    served.counter.labels("a").inc(3)
    answer = await client.get("/metrics", headers={"accept": accept} if accept else {})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'seen_total{kind="a"} 3.0' in answer.text


@pytest.mark.parametrize(
    "accept", [JSON, "application/json, */*;q=0.1", "text/plain;q=0.5, application/*", "APPLICATION/JSON"]
)
async def test_metrics_are_json_if_the_client_prefers_it(served, client, accept):
    served.counter.labels("a").inc(3)
    answer = await client.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == JSON
    samples = answer.json()["seen"]["samples"]
    assert {"name": "seen_total", "labels": {"kind": "a"}, "value": 3.0} in samples


async def test_metrics_json_is_always_json(client):
    answer = await client.get("/metrics.json", headers={"accept": "text/plain"})
    assert answer.headers["content-type"] == JSON
    assert answer.json()["seen"]["type"] == "counter"


async def test_health_is_200_while_the_process_answers(served, client):
    assert (await client.get("/healthz")).json() == {"status": "alive"}
    assert (await client.get("/readyz")).json() == {"status": "ready"}
    served.admission.is_draining = True
    answer = await client.get("/v2/health/ready")
    assert (answer.status_code, answer.json()["error"]) == (503, "the server is not ready: it is shutting down")
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "it is shutting down")
    for path in ("/healthz", "/v2/health/live"):
        assert (await client.get(path)).status_code == 200, "it answers while it drains"


async def test_status_shows_queues_and_blocks(client):
    status = (await client.get("/v1/status")).json()
    assert status["ready"] is True
    assert status["queues"] == {"blk-echo-1": {"waiting": 3, "running": 2}}
    assert {block["state"] for block in status["blocks"]} == {"ready", "failed"}
    echo = next(block for block in status["blocks"] if block["block_id"] == "blk-echo-1")
    assert [echo[key] for key in ("platform", "precision", "device", "note")] == ["onnxruntime_onnx", "fp32", "cpu", ""]
    assert status["limits"] == {"store": "memory", "away": False, "share": 1.0}


async def test_the_openapi_document_has_every_route(client):
    document = (await client.get("/openapi.json")).json()
    assert {
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/stats",
        *(
            f"/v2/models/{{model}}{version}{what}"
            for version in ("", "/versions/{version}")
            for what in ("", "/ready", "/config", "/stats", "/infer", "/generate", "/generate_stream")
        ),
        "/v2/repository/index",
        "/v2/repository/models/{model}/load",
        "/v2/repository/models/{model}/unload",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/embeddings",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/images/upscale",
        "/v1/infer",
        "/v1/infer-multipart",
        "/v1/rerank",
        "/v1/server",
        "/v2/rerank",
        "/v1/status",
        "/metrics",
        "/metrics.json",
        "/healthz",
        "/readyz",
        "/v1/models/{model}/routing",
        "/v1/cache",
        "/v1/sessions",
        "/logs",
        "/logs/block/{block_id}",
        "/logs/request/{request_id}",
        "/logs/session/{session_id}",
        "/logs/session_block",
    } == set(document["paths"])


async def test_every_reference_in_the_document_exists(client):
    answer = await client.get("/openapi.json")
    names = set(re.findall(r"#/components/schemas/(\w+)", answer.text))
    assert names <= set(answer.json()["components"]["schemas"])
    for path, methods in answer.json()["paths"].items():
        for operation in methods.values():
            assert {"200", "default"} == set(operation["responses"])
            named = {item["name"] for item in operation["parameters"] if item["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))


async def test_documented_methods_match_the_answered_ones(client):
    document = (await client.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method in {"get", "post", "put", "delete", "patch"} - set(methods):
            answer = await client.request(method, path.replace("{", "").replace("}", ""))
            assert answer.status_code == 405, (method, path)


async def test_the_api_reference_loads_nothing_from_other_servers(client):
    answer = await client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "openapi.json" in answer.text
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self' 'sha256-" in policy
    for name in re.findall(r'(?:src|href)="(docs/[^"]+)"', answer.text):
        found = await client.get(f"/{name}")
        assert found.status_code == 200, name
        assert len(found.content) > 100
