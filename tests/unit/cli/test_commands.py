"""Commands that need no server: their output, their errors, their exit codes."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import main as cli
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable

MODELS = Path(__file__).parents[3] / "models"
NOBODY = "127.0.0.1:1"
run = CliRunner().invoke


def problem(*arguments: str, stdin: str = "") -> PenstockError:
    result = run(cli.app, list(arguments), input=stdin)
    assert isinstance(result.exception, PenstockError), result.output
    return result.exception


def test_version_is_printed() -> None:
    result = run(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("penstock ")


def test_errors_are_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["penstock", "embed", "x", "--server", NOBODY])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("penstock: no answer (")
    assert "is `penstock serve` running at http://127.0.0.1:1?" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "command",
    [
        ["embed", "x", "--server", NOBODY],
        ["rerank", "x", "y", "--server", NOBODY],
        ["classify", "--text", "x", "--model", "m", "--server", NOBODY],
        ["infer", "m", "--server", NOBODY],
        ["generate", "x", "--server", NOBODY],
        ["generate", "x", "-n", "2", "--json", "--server", NOBODY],
        ["status", "--server", f"http://{NOBODY}"],
        ["status", "--server", NOBODY],
    ],
)
def test_commands_report_a_server_that_does_not_run(command: list[str]) -> None:
    assert isinstance(found := problem(*command), Unavailable)
    assert "is `penstock serve` running at" in found.message


def test_upscale_reports_a_missing_server(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x")
    found = problem("upscale", str(tmp_path / "a.jpg"), str(tmp_path / "b.png"), "--server", NOBODY)
    assert isinstance(found, Unavailable)


def test_embed_reports_invalid_texts(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "no texts" in problem("embed", stdin="").message
    assert "cannot be read" in problem("embed", "--file", str(tmp_path / "none")).message
    assert "not UTF-8 text" in problem("embed", "--file", str(tmp_path / "latin")).message
    assert "either" in problem("embed", "x", "--file", str(tmp_path / "latin")).message
    assert ".npy" in problem("embed", "x", "--output", "vectors.csv").message


def test_generate_reports_invalid_prompts(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "stdin: the prompt is empty" in problem("generate", stdin=" \n").message
    assert "not UTF-8 text" in problem("generate", "--file", str(tmp_path / "latin")).message
    assert "either" in problem("generate", "x", "--file", str(tmp_path / "latin")).message
    assert "NAME=VALUE" in problem("generate", "x", "-p", "alone").message


def test_chat_continues_after_a_failure_and_reports_it_at_the_end(tmp_path: Path) -> None:
    result = run(cli.app, ["chat", "--server", NOBODY], input=f"hello\n/save {tmp_path / 'talk.json'}\n/quit\nmore\n")
    assert (result.exit_code, result.stderr.count("is `penstock serve` running")) == (2, 1)
    assert json.loads((tmp_path / "talk.json").read_text())["messages"] == []
    assert run(cli.app, ["chat", "hello", "--server", NOBODY]).exit_code == 2
    assert run(cli.app, ["chat", "--server", NOBODY], input="/help\n").exit_code == 0


def test_rerank_reports_invalid_documents(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert "the query is empty" in problem("rerank", " ", "x").message
    assert "no documents" in problem("rerank", "q", stdin="").message
    assert "no documents; expected one per line" in problem("rerank", "q", "--file", str(tmp_path / "empty")).message
    assert "documents either as arguments or with --file" in problem("rerank", "q", "x", "--file", "y").message
    assert run(cli.app, ["rerank", "q", "x", "--top-n", "0"]).exit_code == 2


def test_classify_takes_files_or_texts() -> None:
    assert "either" in problem("classify", "--model", "m").message
    assert "either" in problem("classify", "a.png", "--text", "b", "--model", "m").message
    assert "--model" in run(cli.app, ["classify", "a.png"]).output


def test_model_list_shows_models_and_versions() -> None:
    result = run(cli.app, ["model", "list", "-r", str(MODELS), "--json"])
    found = {row["model"]: row for row in json.loads(result.stdout)}
    assert found["srcnn"]["versions"] == ["1"]
    assert found["srcnn"]["task"] == "upscale"
    assert "srcnn" in run(cli.app, ["model", "list", "-r", str(MODELS)]).output


def test_model_list_shows_faults(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.yaml").write_text("task: embed\nsize: 3\n")
    rows = json.loads(run(cli.app, ["model", "list", "-r", str(tmp_path), "--json"]).stdout)
    assert "model.yaml:2: unknown key 'size'" in rows[0]["problem"]
    assert "no such folder of models" in problem("model", "list", "-r", str(tmp_path / "none")).message
    (tmp_path / "empty").mkdir()
    assert "no models in" in run(cli.app, ["model", "list", "-r", str(tmp_path / "empty")]).output


def test_model_check_runs_the_model(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "srcnn", tmp_path / "srcnn")
    result = run(cli.app, ["model", "check", str(tmp_path), "--json"])
    (found,) = json.loads(result.stdout)
    assert (result.exit_code, found["inputs"]) == (0, ["image BYTES [-1, 1]"])
    (tmp_path / "srcnn" / "1" / "model.onnx").write_bytes(b"no graph")
    result = run(cli.app, ["model", "check", str(tmp_path / "srcnn")])
    assert result.exit_code == 1
    assert "is not an ONNX file" in result.output


def test_model_check_reports_a_path_without_models(tmp_path: Path) -> None:
    assert "neither a model's folder" in problem("model", "check", str(tmp_path)).message


def test_model_import_names_missing_options(tmp_path: Path) -> None:
    assert "is not a valid model name" in problem("model", "import", "a/b").message
    assert "--source FOLDER" in problem("model", "import", "mine").message
    assert (
        "no such .gguf file, and no folder"
        in problem("model", "import", "mine", "--source", str(tmp_path / "none")).message
    )
    assert "no such file" in problem("model", "import", "mine", "--source", str(tmp_path)).message


def test_upscale_requires_an_output() -> None:
    assert isinstance(problem("upscale", "a.jpg"), InvalidRequest)
