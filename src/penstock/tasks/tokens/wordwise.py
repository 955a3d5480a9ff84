"""Whether a text's token ids are those of its words, one after another; read from what a tokenizer is made of."""

import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordPiece

# Each of them changes no blank, and nothing on one side of a blank by what is on its other side.
NORMALIZERS = {"BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"}
AT_BLANKS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}  # which cut a text at every blank
WITHIN_WORDS = AT_BLANKS | {"Punctuation", "Digits"}  # which may cut further what was cut at blanks
# What is at stake, once more, against what a future release of the library may do.
PROBE = "A naïve\twörd,  [MASK]ed\n永遠 ﬁ e\u0301 \u0301\u200d x\u0000y \u00a0Don't..."


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """What stands around the ids of one text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.before) + len(self.after)


def find_special_ids(tokenizer: Tokenizer) -> SpecialIds | None:
    """None where something about the tokenizer, which must not cut texts, is not known to take words one by one."""
    try:
        special = _special_ids(_parts(tokenizer.post_processor)) if _is_wordwise(tokenizer) else None
        return special if special is not None and _holds(tokenizer, special) else None
    except Exception:  # noqa: BLE001 - the library raises nothing narrower; a part that is told in another way is not known
        return None


def _is_wordwise(tokenizer: Tokenizer) -> bool:
    return (
        isinstance(tokenizer.model, WordPiece)
        and _keeps_words_apart(_parts(tokenizer.normalizer))
        and _cuts_at_blanks(_parts(tokenizer.pre_tokenizer))
        # A token of more than a word could begin in one and end in another; one that is sought in what the
        # normalizer made may have become several words.
        and not any(
            token.normalized or token.content.split() != [token.content]
            for token in tokenizer.get_added_tokens_decoder().values()
        )
    )


def _holds(tokenizer: Tokenizer, special: SpecialIds) -> bool:
    words = [tokenizer.encode(word, add_special_tokens=False).ids for word in PROBE.split(" ")]
    return bool(tokenizer.encode(PROBE).ids == [*special.before, *chain.from_iterable(words), *special.after])


def _parts(component: Any) -> dict[str, Any] | None:
    """As tokenizer.json has them."""
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


def _special_ids(processor: dict[str, Any] | None) -> SpecialIds | None:
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
