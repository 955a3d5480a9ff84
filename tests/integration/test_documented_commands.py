"""Every command and program in README.md and docs/ runs as written, or is named below with the reason why not.

docs/models.md and docs/engines.md have parts that are followed word for word: test_adding.py runs those.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from onnx import TensorProto, helper
from PIL import Image
from typer.testing import CliRunner

from benchmarks.server import ServerProcess
from penstock.cli import main as cli
from penstock.engines.genai.gguf_files import find_smollm2
from penstock.engines.onnx.bert_file import find_minilm_weights
from tests.directory_bed import curl_commands
from tests.servers import ROOT, write_add_sub, write_factor, write_identity, write_model
from tests.small_models import write_dense

FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLLOWED = re.compile(r"<!-- follow -->.*?<!-- end -->", re.DOTALL)
FENCED = re.compile(r"^ *```(\w*)\n.*?^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:penstock |scripts/|benchmarks/|pip install )[^`]+)`|^ *\$ (penstock .+)$", re.MULTILINE)
COMMENT = re.compile(r"\s+# .*$")
LIMIT_S = 120
# Patterns of commands that are not run, and why.
HOSTS = "needs several hosts; test_documented_cluster.py runs it"
ETCD = "needs etcd and several hosts; test_etcd_hosts.py starts such clusters"
SMALL = "takes minutes; test_documented_measurements.py runs it on small models"
WINDOWS = "--window 0.1 --warm-up 0 --windows 3"
QUICK = f"{WINDOWS} --concurrency 1"
TOKENS = "--prompt-tokens 8 --output-tokens 2"
# Options added to commands that would take minutes, and to those that run until they are stopped.
SHORT = {
    "penstock bench minilm": QUICK,
    "penstock bench minilm --concurrency 1:64:*2": WINDOWS,
    "penstock bench minilm --rate 50:200:50 --protocol rest": WINDOWS,
    "penstock bench smollm2": f"{QUICK} {TOKENS}",
    "penstock bench smollm2 --goodput ttft:500,tpot:50": f"{QUICK} {TOKENS}",
    "penstock bench smollm2 --rate 0.5:4:*2 --goodput ttft:500,tpot:50": f"{WINDOWS} {TOKENS}",
    "penstock bench smollm2 --protocol rest --whole": f"{QUICK} {TOKENS}",
    "penstock bench smollm2 --prompt-tokens 64-512 --output-tokens normal:128,32": f"{QUICK} --output-tokens 2",
    "penstock bench smollm2 --prompt-tokens prompts.jsonl": f"{QUICK} --output-tokens 2",
    'penstock chat "Name three rivers."': "--max-tokens 16",
    "penstock top": "-n 1",
    "penstock serve": "--http-port 0 --grpc-port 0 --data-dir data-of-serve",
    "penstock serve --config server.yaml": "--http-port 0 --grpc-port 0 --data-dir data-of-tls",
    "penstock serve walk": "--http-port 0 --grpc-port 0 --data-dir data-of-walk",
}
ENDLESS = re.compile(r"penstock (serve|(audit|events|log) .*--follow)")
WATCHED_S = 2
STOPPED = 124  # the exit code of `timeout`: the command was still running
DIRECTORY = "calls a directory; test_directory.py runs it"
SCRIPT = "a script of the repository; scripts/bare and CI run it"
NOT_RUN = {
    r"scripts/|\.ci/run|benchmarks/|source \.venv|\.venv/bin/pre-commit": SCRIPT,
    r"penstock .*etcd://|penstock gateway --join 10.0.0.1,": ETCD,
    r".*penstock (manager|gateway|worker|serve) .*10\.": HOSTS,
    r"penstock .*--server 10\.|export PENSTOCK_API_KEY|penstock worker (drain|remove) h3": HOSTS,
    r"penstock fleet ": "needs a Ray cluster; test_fleet.py runs it",
    r"penstock experiment compare A B": "shows alternatives in brackets and names to replace",
    r"penstock tune |penstock experiment (run|compare)": SMALL,
    r"cp -r models /tmp/models|penstock model (build|quantize (minilm|srcnn))|penstock bench .*--device cuda": SMALL,
    r"pip install .*(cuda|onnxruntime-gpu)": "replaces packages of this environment by those for GPUs",
    r"penstock model import NAME ": "shows alternatives in brackets and a name to replace",
    r"curl .*<server-url>/(inference_server|clusters|blocks)": DIRECTORY,
    r"SERVER_ADDRESS=\S+ CLUSTER_ID=": "test_search.py runs it, with models that its policy chooses",
    r"data: ": "the answer of the command before it",
}
# Programs that are parts of a page's text, and what the pages presuppose before them.
TRITON = """
import numpy as np
import tritonclient.grpc as triton
client = triton.InferenceServerClient("127.0.0.1:50051")
"""
PRESUPPOSED = {
    "docs/cache.md": f"""{TRITON}
inputs = [triton.InferInput("text", [1], "BYTES").set_data_from_numpy(np.array([b"one"], dtype=object))]
""",
    "docs/queues.md": f"""{TRITON}
inputs = [triton.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))]
""",
    "docs/direct.md": """
from penstock.pb.inference.grpc_service_pb2 import ModelInferRequest
request = ModelInferRequest(model_name="minilm")
request.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"one")
""",
}
# Pages whose programs are not run here, and the test that reads them from the page and runs them.
HERE = "tests/integration/test_documented_commands.py"
PROGRAMS_ELSEWHERE = {
    "docs/client.md": "tests/integration/test_sdk.py",
    "docs/models.md": "tests/integration/test_adding.py",
    "docs/engines.md": "tests/integration/test_adding.py",
    "docs/packets.md": HERE,  # the model `counter`
    "docs/python-models.md": "tests/unit/engines/python/test_python_engine.py",
    "docs/tasks.md": HERE,  # makes the model `digits` and its image for all pages
    "docs/torch-models.md": "tests/unit/engines/torch/test_docs.py",
}
# Pages with parts of programs of the reader.
PARTS = {
    "docs/search.md": "a ranking policy; test_ranking.py has such ones",
    "docs/streaming.md": "the body of a function; test_sdk.py runs such calls",
}
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
# Pages that create keys, whose names are free on these pages' own servers.
KEYS = (("docs/access.md", "docs/limits.md"), ("docs/admin.md",))


def commands(page: str) -> list[str]:
    text = FOLLOWED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    blocks = [block.replace("\\\n", " ") for block in FENCE.findall(text)]
    lines = [line for block in blocks for line in re.split(r"\n(?![ }\])'])", block)]
    return [COMMENT.sub("", line).strip() for line in lines if line.strip() and not line.startswith("#")]


def reason_not_to_run(command: str) -> str:
    if command in SHORT:
        return ""
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), "")


def programs(page: str) -> list[str]:
    return PROGRAM.findall((ROOT / page).read_text(encoding="utf-8"))


ALL = {page: commands(page) for page in PAGES}
PROGRAMS = {page: found for page in PAGES if (found := programs(page))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("documented")
    models = folder / "models"
    models.mkdir()
    for name in ("minilm", "srcnn", "smollm2"):
        shutil.copytree(ROOT / "models" / name, models / name, copy_function=os.link)
    shutil.copytree(models / "minilm" / "1", models / "minilm" / "2", copy_function=os.link)
    for name in ("ranker", "reranker", "filetype"):
        write_factor(models, name, 2.0)
    write_identity(models, "minilm-int8", "FP32")
    write_identity(models, "recommender", "FP32", "routing: {policy: hash, key: customer}\n")
    write_identity(models, "echo", "FP32", "sessions: {order: true}\n")
    write_dense(models, "mymodel")
    write_add_sub(models, "add-sub")
    write_pictures(models, "detector")
    counter = models / "counter" / "1"
    counter.mkdir(parents=True)
    (counter / "model.py").write_text(PROGRAMS["docs/packets.md"][0])
    (counter.parent / "model.yaml").write_text("engine: python\npython: {takes_packets: true}\n")
    shutil.copytree(ROOT / "examples/global/models/faces", models / "faces")
    made = run(f"python - <<'END'\n{PROGRAMS['docs/tasks.md'][0]}END", folder)
    assert made.returncode == 0, made.stderr
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "query.json").write_text('{"user_query": "chat"}')
    (folder / "experiments").symlink_to(ROOT / "experiments")
    (folder / "FOLDER").symlink_to(find_minilm_weights())
    (folder / "chat.gguf").symlink_to(find_smollm2())
    (folder / "prompts.jsonl").write_text('{"prompt": "Water boils at"}\n')
    settings = re.search(r"^```yaml\n(.*?)^```", (ROOT / "docs/tls.md").read_text(), re.MULTILINE | re.DOTALL)
    assert settings
    (folder / "server.yaml").write_text(settings[1])
    (folder / "story.txt").write_text("Once upon a time")
    (folder / "frames").mkdir()
    Image.new("RGB", (32, 16), "teal").save(folder / "frames" / "1.png")
    Image.new("RGB", (32, 16), "teal").save(folder / "photo.jpg")
    return folder


def write_pictures(models: Path, name: str) -> None:
    shape: list[str | int | None] = ["n", 3, 1024, 1024]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], name, tensors[:1], tensors[1:])
    write_model(models, name, graph)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    settings = {"request_log": {"url": "sqlite:///requests.db"}}
    flags = ("--allow-shared-memory", "--data-dir", str(folder / "penstock-data"))
    with ServerProcess(folder / "models", folder, *flags, settings=settings) as running:
        yield running


# By page: the commands that lead to the situation that the page describes.
SCORE = "penstock model import minilm-score --from minilm --task score && penstock model load minilm-score"
BEFORE = {
    "docs/packets.md": [f"test -d models/minilm-score || {{ {SCORE}; }}"],
    "docs/registry.md": ["penstock model push models/minilm --version 1"],
    "docs/rollouts.md": ["penstock block deploy minilm:1"],
}
CLUSTER = "docs/cluster.md"  # test_documented_cluster.py
RUN = [page for page, found in ALL.items() if page != CLUSTER and not all(map(reason_not_to_run, found))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in RUN if not any(page in pages for pages in KEYS)])
def test_commands_run_as_written(page: str, server: ServerProcess, folder: Path) -> None:
    check(page, server, folder)


@pytest.mark.parametrize("pages", KEYS)
def test_commands_that_create_keys_run_as_written(pages: tuple[str, ...], tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "minilm", "FP32")
    with ServerProcess(tmp_path / "models", tmp_path, "--data-dir", str(tmp_path / "penstock-data")) as running:
        for page in pages:
            check(page, running, tmp_path)


@pytest.mark.parametrize("page", [page for page in PROGRAMS if page not in {*PROGRAMS_ELSEWHERE, *PARTS}])
def test_programs_run_as_written(page: str, server: ServerProcess, folder: Path) -> None:
    failed = []
    for number, program in enumerate(PROGRAMS[page]):
        file = folder / f"{Path(page).stem}-{number}.py"
        file.write_text(PRESUPPOSED.get(page, "") + program)
        file.write_text(at(server, file.read_text()))
        done = run(f"python {file.name}", folder)
        if done.returncode:
            failed.append(f"{program}\n→ {done.returncode}: {done.stderr[-1000:]}")
    assert not failed, "\n\n".join(failed)


def test_programs_that_run_elsewhere_are_read_from_their_pages_there() -> None:
    for page, test in PROGRAMS_ELSEWHERE.items():
        assert page in PROGRAMS
        assert f'{Path(page).name}"' in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not read {page}"


def test_parts_of_programs_are_valid() -> None:
    for page in PARTS:
        for program in PROGRAMS[page]:
            compile(program, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)


def test_every_command_to_a_directory_is_run_by_its_test() -> None:
    elsewhere = {
        " ".join(command.replace("\\\n", " ").split()) for command in curl_commands(ROOT / "docs/directory.md")
    }
    for found in ALL.values():
        for command in found:
            assert reason_not_to_run(command) != DIRECTORY or " ".join(command.split()) in elsewhere, command


def check(page: str, server: ServerProcess, folder: Path) -> None:
    failed = []
    request_id = "ID"
    for command in [*BEFORE.get(page, []), *ALL[page]]:
        if reason_not_to_run(command):
            continue
        text = at(server, f"{command} {SHORT.get(command, '')}").replace("requests/ID", f"requests/{request_id}")
        text = re.sub(r"^curl", "curl --fail-with-body -sS", fill_in(text, server, folder))
        is_endless = ENDLESS.match(command) is not None
        done = run(f"timeout {WATCHED_S} {text}" if is_endless else text, folder)
        if done.returncode != (STOPPED if is_endless else 0):
            failed.append(f"{command}\n→ {done.returncode}: {done.stdout[-500:]}{done.stderr[-1000:]}")
        if accepted := re.search(r"^location: /v1/requests/(\S+)", done.stdout, re.MULTILINE):
            request_id = accepted[1]
    assert not failed, "\n\n".join(failed)


def fill_in(text: str, server: ServerProcess, folder: Path) -> str:
    """Replace a key, a block and its ETag that a page abbreviates by real ones."""
    if "psk_…" not in text:
        return text
    file = folder / "key-of-pages"
    if not file.exists():
        file.write_text(run("penstock key create pages --scope admin", folder).stdout.strip())
    key = file.read_text()
    listed = f"curl -sS {server.http_url}/v1/admin/blocks -H 'authorization: Bearer {key}'"
    block = json.loads(run(listed, folder).stdout)["items"][0]["block_id"]
    shown = run(listed.replace("/blocks", f"/blocks/{block} -i"), folder).stdout
    etag = re.search(r"^etag: (.*?)\s*$", shown, re.MULTILINE | re.IGNORECASE)
    assert etag, shown
    return text.replace("psk_…", key).replace("blk-5f0c…", block).replace('"41-9c0f…"', etag[1])


def at(server: ServerProcess, text: str) -> str:
    """Replace the default ports of a command or program by the server's."""
    text = re.sub(r"(localhost|127\.0\.0\.1):8080", f"127.0.0.1:{server.http_port}", text)
    return re.sub(r"(localhost|127\.0\.0\.1):50051", f"127.0.0.1:{server.grpc_port}", text)


def run(text: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    programs = folder / "bin"
    if not programs.exists():
        programs.mkdir()
        for name, words in (("penstock", "-m penstock"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(folder / "config"),
        "HOME": str(folder),
    }
    return subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_penstock_commands_that_are_not_run_exist_with_their_options() -> None:
    wrong = []
    for page, found in ALL.items():
        for command in filter(reason_not_to_run, found):
            words = list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), shlex.split(command)))
            if words[:1] != ["penstock"] or "[" in command:
                continue
            # With --help, a command parses its options and does nothing.
            words = [*takewhile(lambda word: word != ">", words[1:]), "--help"]
            result = CliRunner().invoke(cli.app, words)
            if result.exit_code:
                wrong.append(f"{page}: {command}: {result.output}")
    assert not wrong, "\n".join(wrong)


def test_blocks_of_commands_are_marked_sh() -> None:
    """Others are not found, so they would not be run."""
    for page in PAGES:
        languages = {block[1] for block in FENCED.finditer((ROOT / page).read_text(encoding="utf-8"))}
        assert not languages & {"bash", "console", "shell", "zsh"}, f"{page}: write ```sh"
        assert ("sh" in languages) == bool(FENCE.search((ROOT / page).read_text(encoding="utf-8"))), page


def test_commands_in_sentences_and_transcripts_exist_with_their_options() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wrong = []
    for page in PAGES:
        for inline, transcript in INLINE.findall((ROOT / page).read_text(encoding="utf-8")):
            command = inline or transcript
            words = shlex.split(" ".join(command.split()))
            if words[0] == "pip":
                (wanted,) = re.findall(r"penstock-serve\[(\w+)\]", command) or ["dev"]
                if wanted not in extras:
                    wrong.append(f"{page}: {command}: there is no extra {wanted}")
            elif words[0] != "penstock":
                if not (ROOT / words[0]).exists():
                    wrong.append(f"{page}: {command}: there is no {words[0]}")
            else:
                wrong += [f"{page}: {command}: {word} is unknown" for word in unknown_words(words[1:])]
    assert not wrong, "\n".join(wrong)


def unknown_words(words: list[str]) -> list[str]:
    """Return the commands and options of a command line that do not exist."""
    found: Any = typer.main.get_command(cli.app)
    rest = list(words)
    while rest and hasattr(found, "commands") and not rest[0].startswith("-"):
        context = typer.Context(found)
        alternatives = {name: found.get_command(context, name) for name in rest.pop(0).split("|")}
        if None in alternatives.values():
            return [name for name, command in alternatives.items() if command is None]
        found = next(iter(alternatives.values()))
    options = {option for each in found.params for option in (*each.opts, *each.secondary_opts)}
    return [word for word in rest if word.startswith("-") and word not in options]


def test_every_reason_not_to_run_a_command_is_in_use() -> None:
    everything = [command for found in ALL.values() for command in found]
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in everything)]
    assert unused == []
