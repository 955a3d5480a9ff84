"""Texts and pairs of texts as token ids: truncation, padding and the marks of pairs."""

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
from penstock.core.signature import PADDING, Signature, TokenRows
from penstock.core.tensors import Tensor, TensorSpec, pack_bytes
from penstock.models.samples.texts import passages, queries
from penstock.tasks.options import ScoreOptions, TextLimits
from penstock.tasks.score import PairTokens
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
def test_a_long_text_has_the_same_tokens_as_the_whole_text(
    folder: Path, tmp_path: Path, kind: str, is_bert: bool
) -> None:
    """Only the head of a request's text is decoded, unless the tokenizer needs the whole text."""
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
    network = TextNetwork("embed", file.parent, ScoreOptions(max_length=32), TOKENS, TextLimits(32, None, 10_000))
    (head,) = network.read(Tensor("text", "BYTES", (1,), pack_bytes([LONG_TEXTS[kind]])), "")
    assert len(head) <= 32 * MOST_CHARS_PER_TOKEN
    assert list(network.encode([head])) == [whole.encode(LONG_TEXTS[kind]).ids]


@pytest.mark.parametrize("text", ["c" * 400, "c" * 40 + " " * 360], ids=["unbroken", "blank"])
def test_texts_with_few_tokens_for_their_length_are_refused_before_reading(folder: Path, text: str) -> None:
    network = TextNetwork("embed", folder, ScoreOptions(max_length=16), TOKENS, TextLimits(32, None, 1000))
    assert len(list(network.encode([text] * 15))) == 15
    with pytest.raises(RequestTooLarge, match="the 100 texts together are too long; send fewer texts per request"):
        next(network.encode([text] * 100))


@pytest.mark.parametrize("damaged_at", [0, 100, 300_000, 999_999])
def test_the_position_of_invalid_utf8_is_reported(folder: Path, damaged_at: int) -> None:
    network = TextNetwork("embed", folder, ScoreOptions(max_length=4), TOKENS, TextLimits(32, None, 1000))
    raw = bytearray("ä".encode() * 500_000)
    raw[damaged_at] = 0xFF
    with pytest.raises(InvalidTensor, match=rf"element 0 is not valid UTF-8: .* at byte {damaged_at // 2 * 2}"):
        network.read(Tensor("text", "BYTES", (1,), pack_bytes([bytes(raw)])), "")


@pytest.mark.parametrize("processor", PROCESSORS)
def test_pairs_equal_those_of_the_tokenizer(folder: Path, tmp_path: Path, processor: str) -> None:
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
        assert list(pairs.rows([(next(ids), next(ids))])) == [(expected.ids, expected.type_ids)]


def test_encoding_a_pair_keeps_the_truncation_limit(folder: Path) -> None:
    tokenizer = TextTokenizer(folder / "tokenizer.json", 6)
    PairTokens(tokenizer, 6)
    assert [len(ids) for ids in tokenizer.encode(["word " * 50])] == [6]


def test_first_text_may_leave_no_room_for_the_second(folder: Path) -> None:
    pairs = PairTokens(TextTokenizer(folder / "tokenizer.json", 8), 8)
    rows = list(pairs.rows([([7] * 9, [8] * 9), ([7] * 4, [8] * 9), ([7], [8] * 2)]))
    assert [ids for ids, _ in rows] == [
        [101, 7, 7, 7, 7, 7, 102, 102],
        [101, 7, 7, 7, 7, 102, 8, 102],
        [101, 7, 102, 8, 8, 102],
    ]
    assert rows[1][1] == [0, 0, 0, 0, 0, 0, 1, 1]


def test_tokenizer_without_pairs_is_rejected(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"zebra": 0}, unk_token="zebra")).save(str(tmp_path / "unknown.json"))
    ((ids, _),) = PairTokens(TextTokenizer(tmp_path / "unknown.json", 8), 8).rows([([0] * 9, [0])])
    assert ids == [0] * 8
    Tokenizer(BPE({"z": 0}, [])).save(str(tmp_path / "broken.json"))
    with pytest.raises(ConfigError, match="cannot encode pairs of texts"):
        PairTokens(TextTokenizer(tmp_path / "broken.json", 8), 8)


@pytest.mark.parametrize("has_types", [True, False])
def test_pairs_and_texts_are_padded_with_zeros(folder: Path, has_types: bool) -> None:
    names = ["input_ids", "attention_mask", "token_type_ids"][: 3 if has_types else 2]
    engine: Any = Signature(tuple(TensorSpec(name, "INT64", (-1, -1)) for name in names), (), "onnx", "fp32")
    graph = TextNetwork("score", folder, ScoreOptions(max_length=16), engine, TextLimits(32, None, 100))
    pairs = PairTokens(graph.tokenizer, 16).rows([([7], [8]), ([7, 7], [8, 8])])
    ids, types = map(list, zip(*pairs, strict=True))
    joined = graph.join([*graph.cut(ids, types).pieces, *graph.cut(list(graph.encode(["cat"]))).pieces])
    assert list(joined) == names
    assert joined["attention_mask"].sum(axis=1).tolist() == [5, 7, 3]
    assert joined["input_ids"][0].tolist() == [101, 7, 102, 8, 102, 0, 0]
    if has_types:
        expected = [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1], [0] * 7]
        np.testing.assert_array_equal(joined["token_type_ids"], expected)


LENGTHS = [3, 40, 16, 17, 3, 16, 1, 33, 3, 40, 3, 3]


def rows_of(lengths: list[int]) -> list[list[int]]:
    """Return rows that begin with their index, so that a test can identify them."""
    return [[place + 1, *range(1000, 1000 + length - 1)] for place, length in enumerate(lengths)]


def network(folder: Path, limits: TextLimits, rows: TokenRows = TokenRows(), max_length: int = 40) -> TextNetwork:  # noqa: B008
    engine = Signature(TOKENS.inputs, (), "torch", "fp16", "cuda", token_rows=rows)
    return TextNetwork("embed", folder, ScoreOptions(max_length=max_length), engine, limits)


@pytest.mark.parametrize("step", [1, 16])
def test_rows_of_similar_length_form_a_piece_and_keep_their_order(folder: Path, step: int) -> None:
    made = network(folder, TextLimits(1024, 65_536), TokenRows(step))
    ids = rows_of(LENGTHS)
    prepared = made.cut(ids)
    padded = [min(-(-length // step) * step, 40) for length in LENGTHS]
    assert [piece.length for piece in prepared.pieces] == list(dict.fromkeys(padded))
    assert sum(piece.padding for piece in prepared.pieces) == sum(padded) - sum(LENGTHS)
    assert prepared.parameters == {"tokens": sum(LENGTHS)}
    joined = made.join(prepared.pieces)
    assert joined["attention_mask"].sum(axis=1)[prepared.order].tolist() == LENGTHS
    for place, row in enumerate(joined["input_ids"][prepared.order].tolist()):
        assert [number for number in row if number] == ids[place]
    answers = [[piece.arrays["input_ids"][:, :1]] for piece in prepared.pieces]
    assert prepared.arrange(answers)[:, 0].tolist() == list(range(1, len(LENGTHS) + 1))


@pytest.mark.parametrize(
    ("limits", "length", "rows"),
    [
        (TextLimits(32), 10, [8, 8, 4]),
        (TextLimits(32, 256), 10, [6, 6, 6, 2]),
        (TextLimits(32, 256), 200, [1] * 20),
        (TextLimits(2), 10, [1] * 20),
        (TextLimits(1024, 65_536), 16, [20]),
    ],
)
def test_a_piece_is_at_most_a_quarter_of_a_batch(
    folder: Path, limits: TextLimits, length: int, rows: list[int]
) -> None:
    """A request of many texts leaves room for other requests, and several instances share it."""
    prepared = network(folder, limits, max_length=256).cut(rows_of([length] * 20))
    assert [piece.rows for piece in prepared.pieces] == rows
    assert prepared.order is None


def test_a_text_without_tokens_is_a_row_of_padding(folder: Path) -> None:
    made = network(folder, TextLimits(32))
    (piece,) = made.cut([[]]).pieces
    assert (piece.rows, piece.length, piece.padding) == (1, 1, 1)
    assert made.join([piece])["attention_mask"].tolist() == [[0]]


def test_batch_has_the_format_of_the_engine(folder: Path) -> None:
    made = network(folder, TextLimits(32), TokenRows(8, is_marked=True, vocabulary=1004))
    (piece,) = made.cut(rows_of([4, 5])).pieces
    ((name, array),) = made.join([piece, piece]).items()
    assert (name, array.dtype) == ("input_ids", np.dtype(np.int32))
    assert array.tolist() == 2 * [[1, 1000, 1001, 1002, *[PADDING] * 4], [2, 1000, 1001, 1002, 1003, *[PADDING] * 3]]
    with pytest.raises(InvalidTensor, match=r"the tokenizer gives 1004 .* ends at 1004: use the tokenizer.json"):
        made.cut(rows_of([4, 6]))


def test_all_lengths_of_an_engine_with_steps_are_warmed_up(folder: Path) -> None:
    made = network(folder, TextLimits(1024, 16_384), TokenRows(16))
    shapes = [inputs["input_ids"].shape for inputs in made.warm_up_inputs()]
    assert shapes == [(1, 16), (1, 40), (1024, 16), (512, 32), (409, 40)]
