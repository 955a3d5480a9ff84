"""Makes the benchmark's texts from the novels in Debian's r-cran-janeaustenr.

apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb unpacked
python training/bench_texts.py unpacked/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb
"""

import gzip
import json
import random
import re
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

TARGET = Path(__file__).parents[1] / "src/penstock/models/samples/data/texts.json.gz"
COUNT = 1500
SEED = 1775
QUERY_WORDS = range(4, 13)
PASSAGE_WORDS = range(40, 81)
SENTENCE = re.compile(r"""\S.*?[.!?]["')]*(?=\s+["'(]?[A-Z]|$)""")
ABBREVIATED = re.compile(r"\b(Mr|Mrs|Dr|St|Esq|Col|Capt|Messrs|[A-Z])\.$")


def main(rdb: Path) -> None:
    paragraphs = [paragraph for lines in read_books(rdb) for paragraph in join_lines(lines)]
    passages, queries = set[str](), set[str]()
    for paragraph in paragraphs:
        sentences = list(split_sentences(paragraph))
        passages.update(group(sentences))
        queries.update(phrase for sentence in sentences for phrase in phrases(sentence))
    rng = random.Random(SEED)
    texts = {"queries": rng.sample(sorted(queries), COUNT), "passages": rng.sample(sorted(passages), COUNT)}
    raw = json.dumps(texts, ensure_ascii=False, indent=0).encode()
    TARGET.write_bytes(gzip.compress(raw, 9, mtime=0))
    print(f"chose from {len(queries)} queries and {len(passages)} passages: {TARGET.stat().st_size} bytes")


def read_books(rdb: Path) -> Iterator[list[str]]:
    """Read R's lazy-load file: the size of each object, then a zlib stream of its serialization."""
    rest = rdb.read_bytes()
    while rest:
        inflater = zlib.decompressobj()
        raw = inflater.decompress(rest[4:])
        rest = inflater.unused_data
        yield list(read_strings(raw))


def read_strings(raw: bytes) -> Iterator[str]:
    """Read a character vector as R's serialize() writes it, in format 3, big-endian."""
    magic, _, _, _, encoding_size = struct.unpack_from(">2s4i", raw)
    assert magic == b"X\n"
    offset = 18 + encoding_size
    flags, count = struct.unpack_from(">ii", raw, offset)
    assert flags & 0xFF == 16, "not a character vector"
    offset += 8
    for _ in range(count):
        _, size = struct.unpack_from(">ii", raw, offset)
        offset += 8
        yield raw[offset : offset + size].decode()
        offset += size


def join_lines(lines: Iterable[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in (*lines, ""):
        if line.strip():
            paragraph.append(line.strip())
        elif paragraph:
            # Underscores were the printed book's italics.
            yield re.sub(r"\s+", " ", " ".join(paragraph).replace("_", "").replace("--", " -- "))
            paragraph = []


def split_sentences(paragraph: str) -> Iterator[str]:
    held = ""
    for match in SENTENCE.finditer(paragraph):
        held = f"{held} {match[0]}".strip()
        if not ABBREVIATED.search(held):
            yield held
            held = ""


def group(sentences: list[str]) -> Iterator[str]:
    """Join whole sentences until they make a passage."""
    words: list[str] = []
    for sentence in sentences:
        words += sentence.split()
        if len(words) in PASSAGE_WORDS:
            yield " ".join(words)
        if len(words) >= PASSAGE_WORDS.start:
            words = []


def phrases(sentence: str) -> Iterator[str]:
    for part in re.split(r"[;:,()\"]| -- ", sentence):
        phrase = part.strip(" '-.!")
        if len(phrase.split()) in QUERY_WORDS:
            yield phrase


if __name__ == "__main__":
    main(Path(sys.argv[1]))
