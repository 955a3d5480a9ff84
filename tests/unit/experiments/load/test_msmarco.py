"""MS MARCO in each of its published formats."""

import gzip
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.core.errors import InvalidRequest
from penstock.experiments.load.msmarco import read_pairs


def test_triples_are_read(tmp_path: Path) -> None:
    file = tmp_path / "triples.train.small.tsv"
    file.write_text("what is rain\tRain is water.\tSnow is ice.\nwho?\tThe crème\tx\n", encoding="utf-8")
    assert read_pairs(file) == [("what is rain", "Rain is water."), ("who?", "The crème")]
    assert read_pairs(file, max_pairs=1) == [("what is rain", "Rain is water.")]


def test_gzipped_top1000_is_read(tmp_path: Path) -> None:
    file = tmp_path / "top1000.dev.tsv.gz"
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        stream.write("12\t34\twhat is rain\tRain is water.\n")
    assert read_pairs(file) == [("what is rain", "Rain is water.")]


def test_collection_queries_and_judgements_are_joined(tmp_path: Path) -> None:
    (tmp_path / "collection.tsv").write_text("0\tnobody asked\n7\tRain is water.\n8\tSnow is ice.\n")
    (tmp_path / "queries.dev.small.tsv").write_text("1\twhat is rain\n2\twhat is snow\n")
    (tmp_path / "qrels.dev.small.tsv").write_text("2\t0\t8\t1\n1\t0\t7\t1\n1\t0\t0\t0\n9\t0\t7\t1\n")
    assert read_pairs(tmp_path) == [("what is snow", "Snow is ice."), ("what is rain", "Rain is water.")]


def test_parquet_with_many_passages_uses_the_selected_ones(tmp_path: Path) -> None:
    rows = [
        {"query": "q1", "passages": {"is_selected": [0, 1], "passage_text": ["a", "b"], "url": ["u", "u"]}},
        {"query": "q2", "passages": {"is_selected": [0, 0], "passage_text": ["c", "d"], "url": ["u", "u"]}},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "validation-00000-of-00001.parquet")
    assert read_pairs(tmp_path) == [("q1", "b"), ("q2", "c")]


def test_parquet_of_triplets_is_read(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([{"query": "q", "positive": "p", "negative": "n"}]), file)
    assert read_pairs(file) == [("q", "p")]


def test_invalid_files_are_reported_with_the_place_and_the_expected_format(tmp_path: Path) -> None:
    ids = tmp_path / "qidpidtriples.tsv"
    ids.write_text("1\t2\t3\n")
    with pytest.raises(InvalidRequest, match=r"line 1: 3 columns are not a query-passage pair; expected triples"):
        read_pairs(ids)
    with pytest.raises(InvalidRequest, match="no such file"):
        read_pairs(tmp_path / "absent.tsv")
    garbage = tmp_path / "garbage.parquet"
    garbage.write_bytes(b"PAR1 not really")
    with pytest.raises(InvalidRequest, match="not a readable Parquet file"):
        read_pairs(garbage)
    other = tmp_path / "other"
    other.mkdir()
    parquet.write_table(pa.Table.from_pylist([{"a": 1}]), other / "x.parquet")
    with pytest.raises(InvalidRequest, match="columns a; expected query"):
        read_pairs(other)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidRequest, match=r"no collection\*\.tsv"):
        read_pairs(empty)
    broken = tmp_path / "broken.tsv.gz"
    broken.write_bytes(b"\x1f\x8bgarbage")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_pairs(broken)
