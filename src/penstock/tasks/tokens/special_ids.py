"""Checks whether a tokenizer encodes texts word by word, and finds the ids of its special tokens, such as [CLS]."""

import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordPiece

# These normalizers keep blanks, and change the text on each side of a blank independently.
NORMALIZERS = {"BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"}
AT_BLANKS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}  # these split a text at every blank
WITHIN_WORDS = AT_BLANKS | {"Punctuation", "Digits"}  # these may split words further
# A sample with special characters, to detect changes in future releases of the library.
PROBE = "A naïve\twörd,  [MASK]ed\n永遠 ﬁ e\u0301 \u0301\u200d x\u0000y \u00a0Don't..."


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids of the special tokens before and after a text, such as [CLS] and [SEP]."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.before) + len(self.after)


def find_special_ids(tokenizer: Tokenizer) -> SpecialIds | None:
    """Return the ids of the special tokens, or None if the tokenizer may not encode word by word.

    The caller must first switch off the tokenizer's truncation.
    """
    try:
        special = _read_special_ids(_describe_component(tokenizer.post_processor)) if _is_wordwise(tokenizer) else None
        return special if special is not None and _passes_probe(tokenizer, special) else None
    except Exception:  # noqa: BLE001 - the library has no exception type of its own
        return None


def _is_wordwise(tokenizer: Tokenizer) -> bool:
    return (
        isinstance(tokenizer.model, WordPiece)
        and _keeps_words_apart(_describe_component(tokenizer.normalizer))
        and _cuts_at_blanks(_describe_component(tokenizer.pre_tokenizer))
        # An added token with a blank could span two words; a normalized added token may become several words.
        and not any(
            token.normalized or token.content.split() != [token.content]
            for token in tokenizer.get_added_tokens_decoder().values()
        )
    )


def _passes_probe(tokenizer: Tokenizer, special: SpecialIds) -> bool:
    words = [tokenizer.encode(word, add_special_tokens=False).ids for word in PROBE.split(" ")]
    return bool(tokenizer.encode(PROBE).ids == [*special.before, *chain.from_iterable(words), *special.after])


def _describe_component(component: Any) -> dict[str, Any] | None:
    """Return a component of the tokenizer in the format of tokenizer.json."""
    return None if component is None else json.loads(component.__getstate__())


def _keeps_words_apart(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_words_apart, normalizer["normalizers"]))
    return normalizer["type"] in NORMALIZERS


def _cuts_at_blanks(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    cuts = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    kinds = [cut["type"] for cut in cuts]
    return bool(kinds) and kinds[0] in AT_BLANKS and WITHIN_WORDS.issuperset(kinds)


def _read_special_ids(processor: dict[str, Any] | None) -> SpecialIds | None:
    if processor is None:
        return SpecialIds()
    if processor["type"] in ("BertProcessing", "RobertaProcessing"):
        return SpecialIds((processor["cls"][1],), (processor["sep"][1],))
    if processor["type"] != "TemplateProcessing":
        return None
    around: tuple[list[int], list[int]] = ([], [])
    texts = 0
    for part in processor["single"]:
        if part.get("Sequence", {}).get("id") == "A":
            texts += 1
        elif "Sequence" in part:
            return None
        else:
            around[texts > 0].extend(processor["special_tokens"][part["SpecialToken"]["id"]]["ids"])
    return SpecialIds(tuple(around[0]), tuple(around[1])) if texts == 1 else None
