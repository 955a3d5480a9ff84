"""Converts texts to vectors in the handlers of all peers. Needs numpy, tokenizers and an engine."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_LENGTH = 256


class Embedder:
    """An embedder whose `engine` is onnx (ONNX Runtime, FP32) or openvino (BF16 if the processor supports it)."""

    def __init__(self, folder: str | os.PathLike[str], engine: str = "onnx", threads: int = 1) -> None:
        from tokenizers import Tokenizer

        path = Path(folder)
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_LENGTH)
        self._tokenizer.enable_padding()
        self._run = {"onnx": onnx_run, "openvino": openvino_run}[engine](path / "model.onnx", threads)

    def embed(self, texts: Sequence[str]) -> Any:
        """Return a float32 array [n, 384]; the texts are padded to the longest of them."""
        import numpy as np

        found = self._tokenizer.encode_batch(list(texts))
        ids = np.array([encoding.ids for encoding in found], dtype=np.int64)
        mask = np.array([encoding.attention_mask for encoding in found], dtype=np.int64)
        return self._run({"input_ids": ids, "attention_mask": mask})

    def embed_alike(self, texts: Sequence[str], max_tokens: int = 256) -> Any:
        """Like `embed`, in batches of similar lengths, for servers whose own batches mix lengths."""
        import numpy as np

        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = np.empty((len(texts), 384), np.float32)
        while order:
            longest = max(1, len(texts[order[-1]]) // 4)
            batch = [order.pop() for _ in range(min(len(order), max(1, max_tokens // longest)))]
            vectors[batch] = self.embed([texts[index] for index in batch])
        return vectors


def onnx_run(file: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


def openvino_run(file: Path, threads: int) -> Any:
    import openvino

    core = openvino.Core()
    has_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16" if has_bf16 else "f32"}
    properties["NUM_STREAMS"] = 1
    properties["ENABLE_CPU_PINNING"] = False  # otherwise all one-thread processes would run on one core
    request = core.compile_model(str(file), "CPU", properties).create_infer_request()
    # Inputs are arrays that live until the answer is there: no copy in; the answer is the request's own memory.
    return lambda inputs: request.infer(inputs, share_inputs=True)[0].copy()
