"""Read query-passage pairs of MS MARCO from a local path, in the formats in which MS MARCO is distributed.

- A TSV file, plain or gzipped: `triples.*` (query, passage, passage) or `top1000.*` (qid, pid, query, passage).
- A folder with `collection.tsv`, `queries.*.tsv` and `qrels.*.tsv`, joined by their ids.
- A Parquet file or a folder of Parquet files: `query` with `passages.passage_text` and `passages.is_selected`, or
  `query` with `positive` or `passage`.
"""

import gzip
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from penstock.core.errors import InvalidRequest

Pair = tuple[str, str]
MAX_PAIRS = 100_000
FORMS = "triples.*.tsv, top1000.*.tsv, a folder with collection.tsv, queries.*.tsv and qrels.*.tsv, or Parquet"


def read_pairs(path: Path, max_pairs: int = MAX_PAIRS) -> list[Pair]:
    """Return the first `max_pairs` pairs, in the order of the file."""
    try:
        pairs = list(islice(_read_any_format(path, max_pairs), max_pairs))
    except FileNotFoundError as error:
        raise InvalidRequest(f"{error.filename}: no such file or folder") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: cannot be read: {error}") from error
    if not pairs:
        raise InvalidRequest(f"{path}: no query-passage pairs; expected {FORMS}")
    return pairs


def _read_any_format(path: Path, max_pairs: int) -> Iterator[Pair]:
    if path.is_dir():
        parquet = sorted(path.rglob("*.parquet"))
        if parquet:
            for file in parquet:
                yield from _read_parquet_pairs(file)
        else:
            yield from _join_pairs(path, max_pairs)
    elif path.suffix == ".parquet":
        yield from _read_parquet_pairs(path)
    else:
        yield from _read_tsv_pairs(path)


def _read_tsv_pairs(file: Path) -> Iterator[Pair]:
    for number, cells in _read_rows(file):
        if len(cells) == 4 and cells[0].isdigit() and cells[1].isdigit():
            yield cells[2], cells[3]
        elif len(cells) == 3 and not all(cell.isdigit() for cell in cells):
            yield cells[0], cells[1]
        else:
            raise InvalidRequest(
                f"{file}, line {number}: {len(cells)} columns are not a query-passage pair; expected {FORMS}"
            )


def _join_pairs(folder: Path, max_pairs: int) -> Iterator[Pair]:
    found = {kind: _find_file(folder, kind) for kind in ("collection", "queries", "qrels")}
    if missing := [kind for kind, file in found.items() if file is None]:
        raise InvalidRequest(f"{folder}: no {missing[0]}*.tsv in this folder; expected {FORMS}")
    collection, queries, qrels = (file for file in found.values() if file is not None)
    # The collection has millions of passages, so only those of the first judgements are loaded.
    text_of = dict(_read_texts(queries))
    wanted = list(islice(((qid, pid) for qid, pid in _read_judgements(qrels) if qid in text_of), max_pairs))
    passages = _pick_texts(_read_texts(collection), {pid for _, pid in wanted})
    return ((text_of[qid], passages[pid]) for qid, pid in wanted if pid in passages)


def _find_file(folder: Path, kind: str) -> Path | None:
    files = (file for file in folder.iterdir() if file.name.startswith(kind) and ".tsv" in file.suffixes)
    return min(files, default=None)


def _read_texts(file: Path) -> Iterator[tuple[str, str]]:
    for number, cells in _read_rows(file):
        if len(cells) != 2:
            raise InvalidRequest(f"{file}, line {number}: {len(cells)} columns; expected an id and a text")
        yield cells[0], cells[1]


def _read_judgements(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the ids of relevant pairs. Lines are qid, 0, pid, relevance, with tabs (MS MARCO) or spaces (TREC)."""
    for number, cells in _read_rows(file):
        fields = cells if len(cells) == 4 else cells[0].split()
        if len(fields) != 4:
            raise InvalidRequest(f"{file}, line {number}: expected qid, 0, pid and a relevance")
        if fields[3] != "0":
            yield fields[0], fields[2]


def _pick_texts(texts: Iterable[tuple[str, str]], wanted: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for identity, text in texts:
        if identity in wanted:
            found[identity] = text
            if len(found) == len(wanted):
                break
    return found


def _read_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    with _open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, line.rstrip("\n").split("\t")


def _open_text(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8", newline="\n")
    return file.open(encoding="utf-8", newline="\n")


def _read_parquet_pairs(file: Path) -> Iterator[Pair]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InvalidRequest("Parquet files need pyarrow: pip install 'penstock-serve[bench]'") from error
    try:
        table = parquet.ParquetFile(file)
        names = set(table.schema_arrow.names)
        passage = next((name for name in ("passages", "positive", "passage") if name in names), None)
        if "query" not in names or passage is None:
            raise InvalidRequest(
                f"{file}: columns {', '.join(sorted(names))}; expected query with passages or positive"
            )
        for batch in table.iter_batches(1024, columns=["query", passage]):
            for row in batch.to_pylist():
                yield from _pair_with_passages(row["query"], row[passage])
    except pyarrow.ArrowException as error:
        raise InvalidRequest(f"{file}: not a readable Parquet file: {error}") from error


def _pair_with_passages(query: str, passages: Any) -> Iterator[Pair]:
    """Yield pairs of a query with its selected passages, or with the first passage if none is selected."""
    if isinstance(passages, str):
        yield query, passages
        return
    texts = passages["passage_text"]
    chosen = [text for text, is_selected in zip(texts, passages["is_selected"], strict=True) if is_selected]
    for text in chosen or texts[:1]:
        yield query, text
