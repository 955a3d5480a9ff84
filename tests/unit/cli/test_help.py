"""The help of every command: short lines, complete sentences, defaults, and no types of flags."""

import re
from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.testing import CliRunner

from penstock.cli import main as cli

SENTENCES = re.compile(r"[A-Z`][^\n]*[.!?`)]")
DEFAULT = re.compile(r" \[default: [^\]]+\]$")
BUILT_IN = {"help", "install_completion", "show_completion"}


def every_command() -> Iterator[tuple[str, ...]]:
    def below(path: tuple[str, ...], command: object) -> Iterator[tuple[str, ...]]:
        yield path
        if isinstance(command, TyperGroup):
            for name, each in command.commands.items():
                yield from below((*path, name), each)

    return below((), typer.main.get_command(cli.app))


def find_command(path: tuple[str, ...]) -> TyperCommand | TyperGroup:
    found = typer.main.get_command(cli.app)
    for name in path:
        assert isinstance(found, TyperGroup)
        found = found.commands[name]
    assert isinstance(found, TyperCommand | TyperGroup)
    return found


def read_help(path: tuple[str, ...], flag: str = "-h") -> str:
    # typer leaves two of the terminal's columns empty, but not in its test runner.
    result = CliRunner().invoke(cli.app, [*path, flag], env={"TERM": "xterm"}, terminal_width=78)
    assert result.exit_code == 0, result.output
    return result.output


COMMANDS = pytest.mark.parametrize("path", list(every_command()), ids=" ".join)


@COMMANDS
def test_the_help_of_every_command_fits_80_columns_and_is_plain(path: tuple[str, ...]) -> None:
    text = read_help(path)
    assert text == read_help(path, "--help")
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "bool" not in text
    assert "\x1b" not in text
    summaries = text.partition("Commands:\n")[2].splitlines()
    assert [line for line in summaries if line.endswith("...")] == []


@COMMANDS
def test_every_parameter_has_a_complete_sentence_and_its_default(path: tuple[str, ...]) -> None:
    command = find_command(path)
    assert command.help
    shown = [each for each in command.params if not getattr(each, "hidden", False) and each.name not in BUILT_IN]
    problems = [f"{each.name}: {problem}" for each in shown if (problem := _problem(each))]
    assert problems == []


def _problem(parameter: object) -> str:
    assert isinstance(parameter, TyperOption | TyperArgument)
    text = parameter.help or ""
    sentence = DEFAULT.sub("", text)
    if not SENTENCES.fullmatch(sentence) or " " not in sentence:
        return f"not a complete sentence: {text!r}"
    is_flag = isinstance(parameter, TyperOption) and parameter.is_flag
    if parameter.required or is_flag:
        return ""
    is_shown = parameter.default not in (None, "", ()) and parameter.show_default
    if is_shown and sentence != text:
        return f"two defaults: {text!r}"
    return "" if is_shown or sentence != text else f"no default: {text!r}"


@COMMANDS
def test_every_command_that_takes_a_server_reads_it_from_the_environment(path: tuple[str, ...]) -> None:
    taken = [each for each in find_command(path).params if each.name == "server"]
    options = [each for each in taken if isinstance(each, TyperOption)]
    assert [each.envvar for each in options] == ["PENSTOCK_SERVER"] * len(options)
