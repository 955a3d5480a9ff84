"""`penstock model check`: what is wrong with models, all of it at once, and what to do."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.model.folders import MODELS
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.progress import show_progress
from penstock.core.errors import ConfigError

Seconds = Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that a model may take to load and answer.")]
DEFAULT_S = 300.0
# What a task misses beside the graph: the graph can be tried all the same, and may be wrong, too.
OF_THE_TASK = {"missing_tokenizer", "invalid_tokenizer", "missing_labels", "invalid_labels"}


def check(
    path: Annotated[Path, typer.Argument(help="A model's folder, or a repository.")] = MODELS,
    timeout: Seconds = DEFAULT_S,
    as_json: AsJson = False,
) -> None:
    """Say all that is wrong with a model's folder, load it as a worker would, and ask it once."""
    paths = find_models(path)
    results = []
    checked = (check_model(each, timeout) for each in paths)
    for result in show_progress("checking", checked, len(paths)):
        results.append(result)
        if not as_json:
            _print_result(result)
    if as_json:
        print(json.dumps(results, indent=2))
    if any(result["problems"] for result in results):
        sys.exit(1)


def find_models(path: Path) -> list[Path]:
    """A folder that is or should be a model's, or those of a repository. Raises ConfigError where it is neither."""
    from penstock.models.check.layout import SETTINGS_FILE, looks_like_a_model

    if path.name in ("", ".."):
        path = path.resolve()
    if not path.is_dir():
        raise ConfigError(_explain_no_folder(path))
    if os.path.lexists(path / SETTINGS_FILE):
        return [path]
    if os.path.isfile(path.parent / SETTINGS_FILE):
        raise ConfigError(f"{path} is a version's folder; give the model's: penstock model check {path.parent}")
    try:
        children = [child for child in sorted(path.iterdir()) if child.is_dir() and not child.name.startswith(".")]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    models = [child for child in children if os.path.lexists(child / SETTINGS_FILE)]
    if not models and looks_like_a_model(path):
        return [path]
    models += [child for child in children if child not in models and looks_like_a_model(child)]
    if not models:
        raise ConfigError(f"{path}: neither a model's folder (with {SETTINGS_FILE}) nor a repository of them")
    return sorted(models)


def _explain_no_folder(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which is not there"
    if not path.exists():
        return f"{path}: there is no such folder; say where your models are: penstock model check FOLDER"
    folder = path.parent
    if not os.path.isfile(folder / "model.yaml") and os.path.isfile(folder.parent / "model.yaml"):
        folder = folder.parent
    return f"{path} is a file, and a model is a folder; try: penstock model check {folder}"


def check_model(path: Path, timeout_s: float = DEFAULT_S) -> dict[str, Any]:
    """What --json prints of a model."""
    from penstock.models.check.fit import examine_fit, examine_precision
    from penstock.models.check.layout import examine_folder
    from penstock.models.check.trial_process import try_version
    from penstock.models.folder import version_settings

    layout = examine_folder(path)
    result: dict[str, Any] = {"model": layout.model, "path": str(path)}
    findings = layout.findings
    if layout.settings is not None:
        result |= {"versions": list(layout.versions), "task": layout.settings.task, "engine": layout.settings.engine}
        findings += examine_fit(layout.settings)
    known = {found.code for found in findings if not found.is_warning}
    if layout.settings is not None and known <= OF_THE_TASK:
        for version in layout.versions:
            facts, found = try_version(path, version, timeout_s)
            findings += [each for each in found if not (known and each.code in OF_THE_TASK)]
            findings += examine_precision(version_settings(path, version, layout.settings), facts)
            result |= facts | ({"version": version} if facts else {})
    problems = [found.as_json() for found in findings if not found.is_warning]
    if problems:
        result["problem"] = problems[0]["message"]
    return result | {"problems": problems, "warnings": [found.as_json() for found in findings if found.is_warning]}


def _print_result(result: dict[str, Any]) -> None:
    problems, warnings = result["problems"], result["warnings"]
    if problems:
        print(f"{result['model']}: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
    else:
        print(f"{result['model']}: ready on {result['platform']} in {result['precision']} on {result['device']}")
        _print_facts(result)
    for kind, findings in (("problem", problems), ("warning", warnings)):
        for found in findings:
            print(f"  {kind}{_in_version(found)}: {_indent(found['message'])}")
            if advice := found.get("advice"):
                print(f"    {_indent(advice)}")
    if "example" in result and not problems:
        print(f"  try: {result['example']}")


def _print_facts(result: dict[str, Any]) -> None:
    for key in ("inputs", "outputs"):
        for spec in result[key]:
            print(f"  {key[:-1]} {spec}")
    took = f"; a request took {result['request_ms']:.0f} ms" if "request_ms" in result else ""
    instances = f"{result['instances']} instance{'s' if result['instances'] > 1 else ''}"
    print(
        f"  version {result['version']}: {result['file_bytes'] / 1e6:.1f} MB on disk, "
        f"{result['memory_bytes'] / 1e6:.0f} MB in memory, loaded in {result['load_s']:.1f} s, {instances}{took}"
    )


def _in_version(found: dict[str, str]) -> str:
    version, message = found.get("version", ""), found["message"]
    is_told = f"/{version}/" in message or message.startswith("version ")
    return "" if not version or is_told else f" in version {version}"


def _indent(text: str) -> str:
    return text.replace("\n", "\n      ")
