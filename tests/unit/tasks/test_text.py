"""Texts and pairs of texts as graphs take them: what is cut, what is padded, and how pairs are marked."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import BertProcessing, RobertaProcessing, TemplateProcessing
from tokenizers.trainers import BpeTrainer

from penstock.core.errors import ConfigError, InvalidTensor, RequestTooLarge
from penstock.core.signature import Signature
from penstock.core.tensors import Tensor, TensorSpec, pack_bytes
from penstock.models.samples.texts import passages, queries
from penstock.tasks.options import ScoreOptions
from penstock.tasks.pairs import PairTokens
from penstock.tasks.text import MOST_CHARS_PER_TOKEN, TextNetwork, TextTokenizer

TOKENS: Any = Signature(
    tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask")), (), "onnx", "fp32"
)
SPECIAL = [("[CLS]", 101), ("[SEP]", 102)]
PROCESSORS = {
    "none": None,
    "bert": BertProcessing(SPECIAL[1], SPECIAL[0]),
    "roberta": RobertaProcessing(SPECIAL[1], SPECIAL[0]),
    "template": TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A:0 [SEP]:1 [SEP]:0 $B:1 [CLS]:1 [SEP]:2", SPECIAL),
}


@pytest.mark.parametrize("with_special", [True, False])
def test_reading_only_the_head_of_a_long_text_changes_nothing(folder: Path, with_special: bool) -> None:
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole.enable_truncation(32)
    whole.no_padding()
    parts = [
        "word",
        "Don't",
        "x" * 150,
        "é",
        "e\u0301",
        "\u0301",
        "永遠",
        "[SEP]",
        "[MA",
        "SK]",
        "👩‍👧",
        "\x00",
        "\x1c",
    ]
    parts += [
        " ",
        " ",
        "\n",
        "\t",
        "\u00a0",
        "\u2028",
        "\u3000",
        "\r",
        " " * 300,
        "\x07" * 300,
        ".",
        ",",
        "ﬁ",
        "؟",
    ]
    rng = random.Random(5)
    texts = ["".join(rng.choices(parts, k=rng.randrange(1, 400))) for _ in range(400)]
    texts += ["永" * 5000, "x" * 5000, " " * 5000, "e\u0301" * 5000, "x永" * 999, "永\u0301" * 999]
    expected = [whole.encode(text, add_special_tokens=with_special).ids for text in texts]
    assert list(TextTokenizer(folder / "tokenizer.json", 32).encode(texts, with_special)) == expected


LONG = 4 * 32 * MOST_CHARS_PER_TOKEN
LONG_TEXTS = {
    "prose": " ".join(passages())[:LONG],
    "lines": "\n\n".join(queries())[:LONG],
    "indented": "".join(f"{'    ' * (number % 9)}{text}\n" for number, text in enumerate(queries()))[:LONG],
    "table": "".join(f"| {text[:9]:<60} |\n" for text in queries())[:LONG],
    "quoted": f"see {'A' * 3000} and then {' '.join(passages())}"[:LONG],
    "unbroken": "a" * LONG,
    "unbroken and then not": "a" * 5000 + " " + " ".join(passages())[:LONG],
    "emoji": "\U0001f600" * LONG,
    "accents": "e\u0301" * LONG,
    "chinese": "永遠" * LONG,
    "blank": " " * LONG,
    "without blanks": "".join(passages()).replace(" ", "")[:LONG],
}


@pytest.mark.parametrize("kind", LONG_TEXTS)
@pytest.mark.parametrize("is_bert", [True, False])
def test_a_long_text_has_the_tokens_of_its_whole(folder: Path, tmp_path: Path, kind: str, is_bert: bool) -> None:
    """As a request brings it, of which at most a head is ever decoded; also by a tokenizer that may not be cut."""
    file = folder / "tokenizer.json"
    if not is_bert:
        file = tmp_path / "tokenizer.json"
        other = Tokenizer(BPE(unk_token="[UNK]"))
        other.pre_tokenizer = Metaspace()
        other.train_from_iterator(queries(), BpeTrainer(vocab_size=2000, special_tokens=["[UNK]"], show_progress=False))
        other.save(str(file))
    whole = Tokenizer.from_file(str(file))
    whole.enable_truncation(32)
    whole.no_padding()
    network = TextNetwork("embed", file.parent, ScoreOptions(max_length=32), TOKENS, 10_000)
    (head,) = network.read(Tensor("text", "BYTES", (1,), pack_bytes([LONG_TEXTS[kind]])), "")
    assert len(head) <= 32 * MOST_CHARS_PER_TOKEN
    assert list(network.encode([head])) == [whole.encode(LONG_TEXTS[kind]).ids]


@pytest.mark.parametrize("text", ["c" * 400, "c" * 40 + " " * 360], ids=["unbroken", "blank"])
def test_texts_that_have_few_tokens_for_their_length_are_refused_before_they_are_read(folder: Path, text: str) -> None:
    network = TextNetwork("embed", folder, ScoreOptions(max_length=16), TOKENS, 1000)
    assert len(list(network.encode([text] * 15))) == 15
    with pytest.raises(RequestTooLarge, match="the 100 texts are too long together; send fewer at a time"):
        next(network.encode([text] * 100))


@pytest.mark.parametrize("damaged_at", [0, 100, 300_000, 999_999])
def test_what_is_no_utf8_is_found_where_it_is(folder: Path, damaged_at: int) -> None:
    network = TextNetwork("embed", folder, ScoreOptions(max_length=4), TOKENS, 1000)
    raw = bytearray("ä".encode() * 500_000)
    raw[damaged_at] = 0xFF
    with pytest.raises(InvalidTensor, match=rf"element 0 is not valid UTF-8: .* at byte {damaged_at // 2 * 2}"):
        network.read(Tensor("text", "BYTES", (1,), pack_bytes([bytes(raw)])), "")


@pytest.mark.parametrize("processor", PROCESSORS)
def test_pairs_are_as_the_tokenizer_makes_them(folder: Path, tmp_path: Path, processor: str) -> None:
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole.no_padding()
    whole.no_truncation()
    whole.post_processor = PROCESSORS[processor]
    whole.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path / "tokenizer.json", 64)
    pairs = PairTokens(tokenizer, 512)
    texts = [("a cat", "purrs [SEP] softly"), ("", "alone"), ("alone", ""), ("", ""), ("x" * 150, "永遠 e\u0301")]
    for first, second in texts:
        expected = whole.encode(first, second)
        ids = tokenizer.encode([first, second], with_special=False)
        (piece,) = pairs.pieces([(next(ids), next(ids))])
        found = piece.arrays["input_ids"].tolist(), piece.arrays["token_type_ids"].tolist()
        assert found == (expected.ids, expected.type_ids)


def test_learning_of_pairs_leaves_the_limit(folder: Path) -> None:
    tokenizer = TextTokenizer(folder / "tokenizer.json", 6)
    PairTokens(tokenizer, 6)
    assert [len(ids) for ids in tokenizer.encode(["word " * 50])] == [6]


def test_a_text_that_fills_all_leaves_none_of_the_other(folder: Path) -> None:
    pairs = PairTokens(TextTokenizer(folder / "tokenizer.json", 8), 8)
    pieces = list(pairs.pieces([([7] * 9, [8] * 9), ([7] * 4, [8] * 9), ([7], [8] * 2)]))
    assert [piece.arrays["input_ids"].tolist() for piece in pieces] == [
        [101, 7, 7, 7, 7, 7, 102, 102],
        [101, 7, 7, 7, 7, 102, 8, 102],
        [101, 7, 102, 8, 8, 102],
    ]
    assert pieces[1].arrays["token_type_ids"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert [piece.length for piece in pieces] == [8, 8, 6]


def test_a_tokenizer_that_knows_no_text_is_refused(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"zebra": 0}, unk_token="zebra")).save(str(tmp_path / "unknown.json"))
    (piece,) = PairTokens(TextTokenizer(tmp_path / "unknown.json", 8), 8).pieces([([0] * 9, [0])])
    assert piece.arrays["input_ids"].tolist() == [0] * 8
    Tokenizer(BPE({"z": 0}, [])).save(str(tmp_path / "broken.json"))
    with pytest.raises(ConfigError, match="makes no pairs of texts"):
        PairTokens(TextTokenizer(tmp_path / "broken.json", 8), 8)


@pytest.mark.parametrize("has_types", [True, False])
def test_pairs_and_texts_are_padded_with_zeros(folder: Path, has_types: bool) -> None:
    names = ["input_ids", "attention_mask", "token_type_ids"][: 3 if has_types else 2]
    engine: Any = Signature(tuple(TensorSpec(name, "INT64", (-1, -1)) for name in names), (), "onnx", "fp32")
    graph = TextNetwork("score", folder, ScoreOptions(max_length=16), engine, 100)
    pieces = list(PairTokens(graph.tokenizer, 16).pieces([([7], [8]), ([7, 7], [8, 8])]))
    joined = graph.join([*pieces, *graph.pieces(["cat"])[0]])
    assert list(joined) == names
    assert joined["attention_mask"].sum(axis=1).tolist() == [5, 7, 3]
    assert joined["input_ids"][0].tolist() == [101, 7, 102, 8, 102, 0, 0]
    if has_types:
        expected = [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1], [0] * 7]
        np.testing.assert_array_equal(joined["token_type_ids"], expected)
