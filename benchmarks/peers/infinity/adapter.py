"""infinity-emb 0.0.78: one process, FastAPI on uvicorn, with dynamic batching of texts by length.

It serves embeddings, rerankers and classifiers, so MiniLM only, over REST (OpenAI's embeddings).

What was set, and why:

- `encoding_format` base64, which its documentation calls a high-performance setting: cheaper than numbers in JSON.
- Engines. Its author's model card recommends `optimum` (ONNX Runtime) for CPUs; `torch` is the default, with
  BetterTransformer (`--bettertransformer`, the default, too) or with `--compile`, which exclude each other. Both use
  the two cores: ONNX Runtime by itself, torch by `OMP_NUM_THREADS`. Fewer would leave one idle, as there is one copy
  of the model.
- `--batch-size` 32 is the default; 8 is what the author's own demonstration uses with optimum.
- optimum 1.24 and transformers 4.48: with optimum 2, infinity's optimization of ONNX files fails ("Going to use the
  unoptimized model"), and BetterTransformer is gone. `--pooling-method mean`, as "auto" takes the first token there.
- `--log-level warning` spares the access log: "for high performance, use info or higher".
- Usage statistics are off (`DO_NOT_TRACK`).

What was left out:

- Comparison "same": the optimum engine pools by itself and asks the file for `last_hidden_state`, token by token; the
  file given has pooled already (`sentence_embedding`), and the engine fails with KeyError 'last_hidden_state'.
- `--dtype bfloat16`: one text of 60 had a cosine of 0.99989 to the reference, below the 0.9999 asked for. Coarser
  types were not tried.
- `--device-id 0,1`, two copies of the model: on two cores no request is ever answered. Its thread pool has six threads
  there (cores + 4), the copies and the batching hold seven; with a larger pool it answers.

For optimum, launch() exports the ONNX file from the weights (export.py; optimum 1.24's own exporter does not know
torch 2.13), and infinity optimizes it further at its start. It finds a local ONNX file only in the current folder, so
it is started there.

`Assets.minilm_torch` must hold, beside the weights, config.json and tokenizer.json: tokenizer_config.json,
special_tokens_map.json, vocab.txt, modules.json, sentence_bert_config.json and 1_Pooling/config.json.
"""

import base64
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import BEST, HOST, MINILM, Assets, Item, Launch, Setting, build_http_post, find_free_ports

HERE = Path(__file__).parent
MODEL = "minilm"
THREADS = 2
EXPORT_TIMEOUT_S = 300

TORCH = {"engine": "torch", "batch": 32, "bettertransformer": True, "compile": False}
CANDIDATES = (
    Setting("ONNX Runtime (optimum), batches of 32", TORCH | {"engine": "optimum"}),
    Setting("ONNX Runtime (optimum), batches of 8", TORCH | {"engine": "optimum", "batch": 8}),
    Setting("torch, BetterTransformer, batches of 32", TORCH),
    Setting("torch, BetterTransformer, batches of 8", TORCH | {"batch": 8}),
    Setting("torch.compile, batches of 32", TORCH | {"bettertransformer": False, "compile": True}),
)


class Infinity:
    name = "infinity"
    title = "infinity-emb 0.0.78"
    grpc_method = ""

    def protocols(self, workload: str) -> Sequence[str]:
        return ("rest",)

    def settings(self, workload: str, comparison: str) -> Sequence[Setting]:
        return CANDIDATES if (workload, comparison) == (MINILM, BEST) else ()

    def refusal(self, workload: str, comparison: str) -> str:
        if workload != MINILM:
            return "serves embeddings, rerankers and classifiers only"
        return "its ONNX engine pools by itself and cannot run a file that has pooled already"

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        values = setting.values
        model, start = str(assets.minilm_torch.resolve()), [str(python.parent / "infinity_emb"), "v2"]
        if values["engine"] == "optimum":
            (folder / "onnx").mkdir()
            environment = os.environ | {"HF_HUB_OFFLINE": "1"}
            export: list[str | Path] = [python, HERE / "export.py", model, folder / "onnx"]
            subprocess.run(export, check=True, timeout=EXPORT_TIMEOUT_S, env=environment, capture_output=True)
            model, start = ".", ["env", f"--chdir={folder / 'onnx'}", *start]
        [port] = find_free_ports(1)
        options = {
            "--model-id": model,
            "--served-model-name": MODEL,
            "--engine": values["engine"],
            "--device": "cpu",
            "--pooling-method": "mean",  # for optimum "auto" is the first token
            "--dtype": "float32",
            "--batch-size": values["batch"],
            "--host": HOST,
            "--port": port,
            "--log-level": "warning",
        }
        command = [*start, *(str(word) for pair in options.items() for word in pair)]
        command += [
            "--compile" if values["compile"] else "--no-compile",
            "--bettertransformer" if values["bettertransformer"] else "--no-bettertransformer",
            "--no-onnx-disable-optimize",
        ]
        return Launch(
            command=command,
            environment={
                "DO_NOT_TRACK": "1",
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(folder),
                "OMP_NUM_THREADS": str(THREADS),
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            },
            targets={"rest": f"{HOST}:{port}"},
            ready_url=f"http://{HOST}:{port}/health",
        )

    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        body = json.dumps({"model": MODEL, "input": item, "encoding_format": "base64"}, ensure_ascii=False).encode()
        return build_http_post("/embeddings", "application/json", body)

    def answer(self, workload: str, protocol: str, body: bytes) -> Any:
        return np.frombuffer(base64.b64decode(json.loads(body)["data"][0]["embedding"]), np.float32)


PEER = Infinity()
