"""Manifests: valid and invalid names of a version's files."""

import hashlib
import json
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.features.registry.manifest import (
    MAX_MANIFEST_BYTES,
    ModelFacts,
    count_shards,
    find_path_fault,
    make_manifest,
    read_document,
    read_manifest,
    split_reference,
)

ONE, TWO = "1" * 64, "2" * 64


def files(*paths: str) -> list[dict[str, Any]]:
    return [{"path": path, "size_bytes": 3, "sha256": ONE} for path in sorted([*paths, "model.yaml"])]


def test_equal_files_have_equal_digests() -> None:
    first = make_manifest("m", "1", files("1/a", "1/b"))
    again = read_manifest(json.dumps(json.loads(first.encoded), indent=3).encode())
    assert again == first
    assert again.digest == first.digest == hashlib.sha256(first.encoded).hexdigest()
    assert first.digest != make_manifest("m", "1", files("1/a")).digest
    assert first.blobs == {ONE: 3}
    assert first.size_bytes == 9


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../up",
        "1/../../up",
        "1/./a",
        "1//a",
        "1/",
        "1/a\\b",
        "1/a\x00b",
        "1/a\nb",
        "c:/a",
        "1/.hidden",
        "1/a.",
        "1/a ",
        "1/" + "x" * 256,
        "1/" + "x/" * 600 + "x",
        "1/e\u0301",
        "1/\ud800",
    ],
)
def test_a_path_that_leaves_the_folder_or_is_ambiguous_is_refused(path: str) -> None:
    assert find_path_fault(path)
    with pytest.raises(InvalidRequest):
        make_manifest("m", "1", files(path))


@pytest.mark.parametrize("path", ["1/model.onnx", "1/weights/é.bin", "1/a b.txt", "1/..a"[:2] + "a..b"])
def test_any_other_path_is_accepted(path: str) -> None:
    assert not find_path_fault(path)


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (["2/a"], "nor inside 1/"),
        (["other.txt"], "nor inside 1/"),
        (["1/a", "1/A"], "same file"),
        (["1/a", "1/a/b"], "a file and a folder"),
    ],
)
def test_contradictory_files_are_refused(paths: list[str], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        make_manifest("m", "1", files(*paths))


def test_files_are_unique_sorted_and_include_the_settings() -> None:
    listed = files("1/a", "1/b")
    with pytest.raises(InvalidRequest, match="sorted"):
        make_manifest("m", "1", listed[::-1])
    with pytest.raises(InvalidRequest, match="without duplicates"):
        make_manifest("m", "1", [listed[0], *listed])
    with pytest.raises(InvalidRequest, match=r"model\.yaml is missing"):
        make_manifest("m", "1", listed[:2])
    with pytest.raises(InvalidRequest):
        make_manifest("m", "1", [])


@pytest.mark.parametrize(
    ("model", "version"), [("../m", "1"), ("m\n", "1"), ("", "1"), ("m", "0"), ("m", "01"), ("m", "x"), ("m", "1\n")]
)
def test_names_and_versions_are_restricted(model: str, version: str) -> None:
    with pytest.raises(InvalidRequest):
        make_manifest(model, version, files())


def test_equal_digests_have_equal_sizes() -> None:
    listed = [*files(), {"path": "1/a", "size_bytes": 4, "sha256": ONE}]
    with pytest.raises(InvalidRequest, match="another size"):
        make_manifest("m", "1", sorted(listed, key=lambda file: str(file["path"])))


@pytest.mark.parametrize("field", [{"sha256": "x"}, {"sha256": ONE.upper().replace("1", "A")}, {"size_bytes": -1}])
def test_invalid_digests_and_sizes_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        make_manifest("m", "1", [{**files()[0], **field}])


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"model": 1}', b"\xff"])
def test_an_invalid_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="manifest"):
        read_manifest(data)


def test_a_huge_manifest_is_not_read() -> None:
    with pytest.raises(RequestTooLarge):
        read_manifest(b" " * (MAX_MANIFEST_BYTES + 1))


def test_shards_are_counted_and_must_be_complete() -> None:
    assert count_shards(make_manifest("m", "1", files("1/model.onnx"))) == 1
    parts = [f"1/model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert count_shards(make_manifest("m", "1", files(*parts))) == 3
    with pytest.raises(InvalidRequest, match="00002 of 00003"):
        count_shards(make_manifest("m", "1", files(parts[0], parts[2])))


@pytest.mark.parametrize(
    "facts",
    [
        {"inputs": [{"name": "x", "datatype": "FLOAT", "shape": [1]}]},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-2]}]},
        {"outputs": [{"name": "", "datatype": "FP32", "shape": [1]}]},
        {"outputs": [{"name": "x", "datatype": "FP32", "shape": []}] * 2},
        {"tags": "one"},
        {"tags": [""]},
        {"batchable": "perhaps"},
        {"quantized": 3},
        {"shards": 0},
        {"surprise": 1},
    ],
)
def test_invalid_facts_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="metadata"):
        read_document(ModelFacts, json.dumps(facts).encode(), "metadata")


def test_references_are_parsed() -> None:
    assert split_reference("m") == ("m", "", "latest")
    assert split_reference("m:12") == ("m", "12", "")
    assert split_reference("m@stable") == ("m", "", "stable")
    for wrong in ("", "m:", "m:x", "m@", "m@1", "m:1@stable", "a/b", "m:01"):
        with pytest.raises(InvalidRequest):
            split_reference(wrong)
