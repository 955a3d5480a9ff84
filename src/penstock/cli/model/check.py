"""`penstock model check`: what is wrong with models, all of it at once, and what to do."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import print_json
from penstock.cli.terminal.progress import show_progress
from penstock.cli.terminal.repository import MODELS


def check(
    path: Annotated[Path, typer.Argument(help="A model's folder, or a repository.")] = MODELS,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that a model may take to load and answer.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Say all that is wrong with a model's folder, load it as a worker would, and ask it once."""
    from penstock.models.check.check import check_model, find_models

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
            print(f"  {kind}{_in_version(found)}: {_indent(found['message'])}")
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
    took = f"; a request took {result['request_ms']:.0f} ms" if "request_ms" in result else ""
    instances = f"{result['instances']} instance{'s' if result['instances'] > 1 else ''}"
    on_device = result["device_memory_bytes"]
    there = f", {on_device / 1e6:.0f} MB on {result['device']}" if on_device else ""
    print(
        f"  version {result['version']}: {result['file_bytes'] / 1e6:.1f} MB on disk, "
        f"{result['memory_bytes'] / 1e6:.0f} MB in memory{there}, loaded in {result['load_s']:.1f} s, {instances}{took}"
    )


def _in_version(found: dict[str, str]) -> str:
    version, message = found.get("version", ""), found["message"]
    is_told = f"/{version}/" in message or message.startswith("version ")
    return "" if not version or is_told else f" in version {version}"


def _indent(text: str) -> str:
    return text.replace("\n", "\n      ")
