"""The word cache returns the tokenizer's ids, for real and for hostile texts, and for suitable tokenizers only."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers import normalizers as n
from tokenizers import pre_tokenizers as p
from tokenizers import processors as post
from tokenizers.models import BPE, WordPiece

from penstock.engines.onnx.bert_file import find_minilm_weights
from penstock.models.samples.texts import mixed
from penstock.tasks.text import TextTokenizer
from penstock.tasks.tokens.special_ids import SpecialIds, find_special_ids
from penstock.tasks.tokens.word_cache import MOST_CHARS, WordCache

FILE = find_minilm_weights() / "tokenizer.json"
SPECIAL = [("[CLS]", 101), ("[SEP]", 102)]
PARTS = [
    *(
        "a",
        "The",
        "penstock",
        "Don't",
        "don’t",
        "naïve",
        "ÀÉÎ",
        "İstanbul",
        "ΣΊΣΥΦΟΣ",
        "straße",
        "ﬁn",
        "Ⅷ",
        "½",
        "１２",
    ),
    *("[CLS]", "[MASK]", "[mask]", "[MASK", "]", "[UNK]", "[PAD]", "[SEP][SEP]", "x[SEP]y", "##ing", "[", "."),
    *("永", "遠に", "한국어", "각", "ไทย", "हिन्दी", "العربية", "👩‍👧", "🇨🇭", "𝒳", "\U0002f800", "\U000e0041"),
    *("e\u0301", "\u0301", "\u0345\u0301", "\u0f71\u0f72", "\u1100\u1161", "\u00a8", "\u2126", "\ufdfa", "\u1e9e"),
    *("\x00", "\ufffd", "\x07", "\x7f", "\x85", "\u00ad", "\u200b", "\u200d", "\u2060", "\ufeff", "\ufffe", "\u180e"),
    *(" ", " ", " ", " ", "  ", "\n", "\n", "\t", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f"),
    *("\u00a0", "\u1680", "\u2003", "\u2028", "\u2029", "\u202f", "\u3000", "x" * 99, "y" * 101, "z" * 300),
]
NORMALIZERS: dict[str, Callable[[], Any]] = {
    "uncased": lambda: n.BertNormalizer(),
    "cased": lambda: n.BertNormalizer(lowercase=False),
    "accents": lambda: n.BertNormalizer(strip_accents=False),
    "as it is": lambda: n.BertNormalizer(
        clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False
    ),
    "none": lambda: None,
    "sequence": lambda: n.Sequence([n.NFD(), n.Lowercase(), n.StripAccents()]),
    "composed": lambda: n.Sequence([n.NFKC(), n.Sequence([n.NFC(), n.NFKD()])]),
}
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bert": p.BertPreTokenizer,
    "whitespace": p.Whitespace,
    "split": p.WhitespaceSplit,
    "sequence": lambda: p.Sequence([p.WhitespaceSplit(), p.Punctuation(), p.Digits(individual_digits=True)]),
}
PROCESSORS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "bert": lambda: post.BertProcessing(SPECIAL[1], SPECIAL[0]),
    "roberta": lambda: post.RobertaProcessing(SPECIAL[1], SPECIAL[0]),
    "template": lambda: post.TemplateProcessing("[CLS] [CLS] $A [SEP]", None, SPECIAL),
    "before": lambda: post.TemplateProcessing("[CLS] $A", None, SPECIAL),
}
WORDWISE = [
    *((name, "bert", "bert") for name in NORMALIZERS),
    *(("uncased", name, "bert") for name in PRE_TOKENIZERS),
    *(("uncased", "bert", name) for name in PROCESSORS),
    ("sequence", "whitespace", "template"),
    ("none", "split", "none"),
]


@pytest.fixture
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_file(str(FILE))
    found.no_truncation()
    found.no_padding()
    return found


def hostile(count: int, seed: int) -> list[str]:
    """Return texts made of the parts above and of random characters."""
    rng = random.Random(seed)

    def character() -> str:
        code = rng.randrange(rng.choice((0x250, 0x3000, 0x10000, 0x20000, 0x110000)))
        return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)

    def part() -> str:
        return character() if rng.random() < 0.3 else rng.choice(PARTS)

    return ["", " ", "\n", *("".join(part() for _ in range(rng.randrange(1, 60))) for _ in range(count))]


def own_ids(tokenizer: Tokenizer, texts: list[str], with_special: bool) -> list[list[int]]:
    return [found.ids for found in tokenizer.encode_batch(texts, add_special_tokens=with_special)]


def words_of(tokenizer: Tokenizer, most_words: int = 1000) -> WordCache:
    return WordCache(lambda words: own_ids(tokenizer, words, with_special=False), most_words)


@pytest.mark.parametrize("kinds", WORDWISE, ids=" ".join)
def test_unusual_texts_get_the_ids_of_the_tokenizer(tokenizer: Tokenizer, kinds: tuple[str, str, str]) -> None:
    """Try an empty cache, a filled one, and one with so little room that it drops words all the time."""
    tokenizer.normalizer = NORMALIZERS[kinds[0]]()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kinds[1]]()
    tokenizer.post_processor = PROCESSORS[kinds[2]]()
    special = find_special_ids(tokenizer)
    assert special is not None
    for max_length in (4, 16, 512):
        tokenizer.enable_truncation(max_length)
        texts = hostile(40, max_length)
        expected = own_ids(tokenizer, texts, with_special=True)
        for words in (words_of(tokenizer), words_of(tokenizer, 50)):
            assert words.encode(texts, special, max_length) == expected
            assert [words.encode([text], special, max_length)[0] for text in texts] == expected
        assert words.encode(texts, SpecialIds(), max_length) == own_ids(tokenizer, texts, with_special=False)


def test_words_of_real_texts_are_cached(tokenizer: Tokenizer) -> None:
    asked: list[int] = []

    def ask(words: list[str]) -> list[list[int]]:
        asked.append(sum(len(word) for word in words))
        return own_ids(tokenizer, words, with_special=False)

    words, special = WordCache(ask), find_special_ids(tokenizer)
    assert special == SpecialIds((101,), (102,))
    texts = mixed(200, 3)
    expected = own_ids(tokenizer, texts, with_special=True)
    for _ in range(20):
        asked.clear()
        assert words.encode(texts, special, 512) == expected
    assert sum(asked) < sum(map(len, texts)) / 100


def test_cache_is_bounded(tokenizer: Tokenizer) -> None:
    words = words_of(tokenizer, 100)
    for number in range(40):
        words.encode([" ".join(f"{number}x{other}" for other in range(20)), "z" * 99, "a b " * 30], SpecialIds(), 512)
        kept = words._newer.keys() | words._older.keys()
        assert len(kept) <= 200
        assert {"a", "b", ""} <= kept
        assert max(map(len, kept)) <= MOST_CHARS
    words.encode([" ".join(map(str, range(300)))], SpecialIds(), 512)  # more words than the cache has room for
    assert len(words._newer) <= 100
    assert words.encode(["1 a"], SpecialIds(), 512) == own_ids(tokenizer, ["1 a"], with_special=False)


def test_threads_may_share_the_cache(tokenizer: Tokenizer) -> None:
    words, special = words_of(tokenizer, 60), SpecialIds((101,), (102,))
    texts = hostile(60, 9)
    expected = own_ids(tokenizer, texts, with_special=True)
    with ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(lambda _: words.encode(texts, special, 10_000), range(12)))


def _with(**parts: Any) -> Callable[[Tokenizer], object]:
    def change(tokenizer: Tokenizer) -> None:
        for name, part in parts.items():
            setattr(tokenizer, name, part)

    return change


REFUSED: dict[str, Callable[[Tokenizer], object]] = {
    "another model": _with(model=BPE()),
    "words that must be known": _with(model=WordPiece({"a": 0}, unk_token="[NONE]")),
    "an unknown normalizer": _with(normalizer=n.Sequence([n.NFD(), n.Replace(" a", "b")])),
    "a prefix": _with(normalizer=n.Prepend("▁")),
    "no words": _with(pre_tokenizer=None),
    "words with their blanks": _with(pre_tokenizer=p.Metaspace()),
    "words cut at punctuation alone": _with(pre_tokenizer=p.Punctuation()),
    "blanks cut last": _with(pre_tokenizer=p.Sequence([p.Punctuation("merged_with_next"), p.WhitespaceSplit()])),
    "an unknown processor": _with(post_processor=post.ByteLevel()),
    "a text twice": _with(post_processor=post.TemplateProcessing("[CLS] $A $A", None, SPECIAL)),
    "a token of two words": lambda tokenizer: tokenizer.add_special_tokens([AddedToken("two words", normalized=False)]),
    "a token that is normalized": lambda tokenizer: tokenizer.add_tokens([AddedToken("永遠", normalized=True)]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_tokenizer_encodes_whole_texts(tokenizer: Tokenizer, case: str) -> None:
    REFUSED[case](tokenizer)
    assert find_special_ids(tokenizer) is None


@pytest.mark.parametrize("change", ["none", "token", "normalizer"])
@pytest.mark.parametrize("max_length", [4, 64])
def test_cached_words_do_not_change_ids(tokenizer: Tokenizer, tmp_path: Path, change: str, max_length: int) -> None:
    if change == "token":
        tokenizer.add_special_tokens(
            [AddedToken("<é>", normalized=False, lstrip=True, rstrip=True), AddedToken("one", single_word=True)]
        )
    elif change == "normalizer":
        tokenizer.normalizer = n.Sequence([n.Replace("a", " b "), n.BertNormalizer()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [*mixed(20, 1), *hostile(20, 2), "one<é>  <é> one\n<é>.one one. ones", "x " * 2000, "[MASK] one " * 900]
    tokenizer.enable_truncation(max_length)
    found = TextTokenizer(tmp_path / "tokenizer.json", max_length)
    for with_special in (True, False, True):
        assert list(found.encode(texts, with_special)) == own_ids(tokenizer, texts, with_special)
