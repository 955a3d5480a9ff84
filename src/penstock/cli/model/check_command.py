"""`penstock model check`: report every problem of a model's folder and how to fix it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.terminal.output import print_json
from penstock.terminal.progress import show_progress
from penstock.terminal.repository_options import MODELS
from penstock.terminal.shared_options import AsJson


def check(
    path: Annotated[Path, typer.Argument(help="Folder of a model, its name in ./models, or a repository.")] = MODELS,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait until a model is loaded and has answered.")
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Check a model and report every problem.

    Loads the model as a worker would, and sends it one request.
    """
    from penstock.models.check.check import check_model, find_models

    if not path.exists() and (MODELS / path).is_dir():
        path = MODELS / path
    paths = find_models(path)
    results = []
    checked = (check_model(each, timeout) for each in paths)
    for result in show_progress("checking", checked, len(paths)):
        results.append(result)
        if not as_json:
            _print_result(result)
    if as_json:
        print_json(results)
    if any(result["problems"] for result in results):
        sys.exit(1)


def _print_result(result: dict[str, Any]) -> None:
    problems, warnings = result["problems"], result["warnings"]
    if problems:
        print(f"{result['model']}: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
    else:
        print(f"{result['model']}: ready on {result['platform']} in {result['precision']} on {result['device']}")
        _print_facts(result)
    for kind, findings in (("problem", problems), ("warning", warnings)):
        for found in findings:
            print(f"  {kind}{_mention_version(found)}: {_indent(found['message'])}")
            if advice := found.get("advice"):
                print(f"    {_indent(advice)}")
    if "example" in result and not problems:
        print(f"  try: {result['example']}")


def _print_facts(result: dict[str, Any]) -> None:
    if result.get("note"):
        print(f"  {result['note']}")
    for key in ("inputs", "outputs"):
        for spec in result[key]:
            print(f"  {key[:-1]} {spec}")
    took = f"; a request took {_format_ms(result['request_ms'])}" if "request_ms" in result else ""
    instances = f"{result['instances']} instance{'s' if result['instances'] > 1 else ''}"
    on_device = result["device_memory_bytes"]
    there = f", {on_device / 1e6:.0f} MB on {result['device']}" if on_device else ""
    size = result["file_bytes"]
    on_disk = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
    print(
        f"  version {result['version']}: {on_disk} on disk, "
        f"{result['memory_bytes'] / 1e6:.0f} MB in memory{there}, loaded in {result['load_s']:.1f} s, {instances}{took}"
    )


def _format_ms(duration_ms: float) -> str:
    return f"{duration_ms:.0f} ms" if duration_ms >= 10 else f"{duration_ms:.2f} ms"


def _mention_version(problem: dict[str, str]) -> str:
    version, message = problem.get("version", ""), problem["message"]
    is_in_message = f"/{version}/" in message or message.startswith("version ")
    return "" if not version or is_in_message else f" in version {version}"


def _indent(text: str) -> str:
    return text.replace("\n", "\n      ")
