"""The report of tuning, in plain words: what was tried, what it gave, and why the winner won."""

from collections.abc import Sequence

from penstock.experiments.table import markdown_table
from penstock.experiments.tuning.record import Tried, TuneRecord
from penstock.experiments.tuning.search import Final
from penstock.experiments.tuning.space import Configuration

NAMES = {
    "engine": "engine",
    "precision": "precision",
    "instances.device": "device",
    "instances.count": "instances",
    "instances.threads": "threads of each",
    "batching.max_tokens": "token budget of a batch",
    "batching.max_rows": "rows in a batch",
    "batching.max_delay_ms": "delay",
}


def to_markdown(record: TuneRecord) -> str:
    parts = [
        f"# Tuning {record.model}\n",
        _summary(record),
        "## Why\n",
        _reasons(record),
        "## What changes\n",
        _changes(record),
        *(["## The finals\n", _finals(record)] if record.finals else []),
        "## Variants\n",
        _variants(record),
        "## All that was measured\n",
        _tried(record),
        _untried(record),
        "## How it was measured\n",
        _method(record),
    ]
    return "\n".join(part for part in parts if part)


def verdict(record: TuneRecord) -> str:
    """One sentence on what came of it."""
    if record.winner is None:
        return "Interrupted: nothing was decided and nothing was changed."
    unmet = ""
    if not record.is_met:
        unmet = f" No configuration has a p99 within {record.p99_ms:g} ms; this one comes nearest."
    if record.is_shipped_best:
        return f"Your settings are as good as anything found.{unmet}"
    found = _final(record, record.winner)
    gain = f"{found.over_shipped:.2f} times the shipped one's throughput" if found else ""
    if found and not record.is_met:
        gain = f"a p99 of {found.p99_ms:.1f} ms"
    return f"{record.winner}: {gain}.{unmet}"


def _summary(record: TuneRecord) -> str:
    objective = ["the most throughput"]
    if record.p99_ms is not None:
        objective.append(f"with a p99 of {record.p99_ms:g} ms at most")
    if record.min_accuracy is not None:
        objective.append(f"with a {record.accuracy_measure} of {record.min_accuracy:g} at least")
    load = record.load
    return (
        f"**{verdict(record)}**\n\n"
        f"Objective: {', '.join(objective)}, under {load['concurrency']} callers over {load['protocol']} with "
        f"{load['items']} item(s) a request. Shipped: {record.shipped} (version {record.version}). "
        f"{record.started}, {record.seconds / 60:.1f} minutes.\n"
    )


def _reasons(record: TuneRecord) -> str:
    if record.winner is None or record.best is None:
        return "The run was interrupted before the finals. What was measured until then is below.\n"
    said = []
    winner, shipped = _final(record, record.winner), _final(record, record.shipped)
    if winner and not record.is_shipped_best:
        rates = f"{winner.rate:.1f}/s" + (f" against {shipped.rate:.1f}/s" if shipped else "")
        said.append(
            f"- It gave {rates} in {record.rounds} rounds, {winner.over_shipped:.2f} times as much in the same rounds; "
            f"a lead of {winner.noise:.0%} would be noise."
        )
    if any(each.name == str(record.shipped.variant) and each.left_out for each in record.variants):
        said.append("- What is shipped is below the accuracy that was asked for, and no choice.")
    if not record.finals:
        said.append("- There was nothing else to try.")
    if record.is_shipped_best and record.best != record.winner and shipped:
        said.append(
            f"- The fastest found, {record.best}, leads by {shipped.lead_of_best - 1:.1%}, "
            f"and a lead within {shipped.noise:.1%} is noise here: what is shipped stays."
        )
    elif record.best != record.winner and winner:
        said.append(
            f"- {record.best} was ahead by {winner.lead_of_best - 1:.1%}, which is within the noise "
            f"({winner.noise:.1%}): of equals, the one with fewer changes is taken, then the more accurate one."
        )
    elif record.best == record.shipped and record.finals:
        said.append("- Nothing was faster in the finals.")
    if not record.is_met:
        said.append(
            f"- No finalist had a p99 within {record.p99_ms:g} ms. They are ordered by p99 in place of throughput."
        )
    elif record.p99_ms is not None:
        slow = [final for final in record.finals if not final.is_within]
        said += [f"- {final.configuration}: p99 {final.p99_ms:.1f} ms is over {record.p99_ms:g} ms." for final in slow]
    return "\n".join(said) + "\n"


def _changes(record: TuneRecord) -> str:
    if record.winner is None or record.is_shipped_best:
        return "Nothing.\n"
    lines = [f"- {NAMES.get(key, key)}: `{key}: {_shown(value)}`" for key, value in record.changes.items()]
    if record.winner.variant.is_converted and record.winner.precision != record.shipped.precision:
        lines.append(f"- the file: converted to {record.winner.precision}, as a new version of the model")
    return "\n".join(lines) + "\n\n" + _applied(record)


def _applied(record: TuneRecord) -> str:
    applied = record.applied
    if applied is None:
        return "It was not written into the model.\n"
    parts = []
    if applied.new_folder:
        parts.append(f"Version {applied.version} was made of version {record.version}.\n")
    if applied.diff:
        parts.append(f"```diff\n{applied.diff.rstrip()}\n```\n")
    undo = [f"cp {backup} {file}" if backup else f"rm {file}" for file, backup in applied.files.items()]
    if applied.new_folder:
        undo.append(f"rm -r {applied.new_folder}")
    parts.append("To undo it:\n\n```\n" + "\n".join(undo) + "\n```\n")
    return "\n".join(parts)


def _finals(record: TuneRecord) -> str:
    rows = []
    for final in record.finals:
        rate, over, p99 = _figures(final)
        equality = f"yes, within {final.noise:.1%}" if final.is_equal else f"no, {final.lead_of_best - 1:.1%} behind"
        rows.append((final.configuration, rate, p99, over, equality, _role(record, final)))
    return _table(("configuration", "items/s", "p99 ms", "over shipped", "equal to the best", ""), rows)


def _figures(found: Final | Tried) -> tuple[str, str, str]:
    return f"{found.rate:.1f}", f"{found.over_shipped:.3f}", f"{found.p99_ms:.1f}"


def _role(record: TuneRecord, final: Final) -> str:
    roles = [("winner", record.winner), ("shipped", record.shipped)]
    found = [name for name, configuration in roles if configuration == final.configuration]
    return ", ".join([*found, *(["over the p99"] if record.is_met and not final.is_within else [])])


def _variants(record: TuneRecord) -> str:
    rows = []
    for variant in record.variants:
        accuracy = (
            "" if variant.accuracy is None else f"{variant.measure} {variant.accuracy:.5g} {variant.unit}".strip()
        )
        rows.append((variant.name, accuracy, variant.left_out or "tried"))
    return _table(("variant", "accuracy", ""), rows)


def _tried(record: TuneRecord) -> str:
    measured = [each for each in record.tried if not each.failed]
    rows = [(each.configuration, each.windows, *_figures(each)) for each in measured]
    failed = [f"- {each.configuration}: {each.failed}" for each in record.tried if each.failed]
    names = ("configuration", "windows", "items/s", "over shipped", "p99 ms")
    found = _table(names, rows) if rows else "Nothing.\n"
    return found + ("\nFailed:\n\n" + "\n".join(failed) + "\n" if failed else "")


def _untried(record: TuneRecord) -> str:
    if not record.untried:
        return ""
    return "Not tried, for want of time:\n\n" + "\n".join(f"- {each}" for each in record.untried) + "\n"


def _method(record: TuneRecord) -> str:
    noise = "" if record.noise is None else f" One such ratio varied by {record.noise:.1%} (standard deviation)."
    machine = ", ".join(f"{key} {value}" for key, value in record.machine.items())
    return (
        "Every configuration had a server of its own, and one was loaded at a time. Contenders took turns in rounds, "
        "and every round had a window of the shipped configuration: figures over shipped are ratios within rounds, so "
        f"that a slow minute is in both.{noise} The finals alone decide. A lead counts beyond three standard errors of "
        f"its median and beyond 3%.\n\nMachine: {machine}.\n"
    )


def _final(record: TuneRecord, configuration: Configuration) -> Final | None:
    return next((final for final in record.finals if final.configuration == configuration), None)


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join(markdown_table(names, rows)) + "\n"


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
