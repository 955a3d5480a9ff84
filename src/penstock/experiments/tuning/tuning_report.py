"""Write the report of a tuning run as Markdown: the tried configurations, the figures, and why the winner won."""

from collections.abc import Sequence

from penstock.experiments.table import format_markdown_table
from penstock.experiments.tuning.record import TriedConfiguration, TuneRecord
from penstock.experiments.tuning.search import Final
from penstock.experiments.tuning.space import Configuration

NAMES = {
    "engine": "engine",
    "precision": "precision",
    "instances.device": "device",
    "instances.count": "instances",
    "instances.threads": "threads per instance",
    "batching.max_tokens": "token budget of a batch",
    "batching.max_rows": "rows in a batch",
    "batching.max_delay_ms": "delay",
}


def to_markdown(record: TuneRecord) -> str:
    parts = [
        f"# Tuning {record.model}\n",
        _format_summary(record),
        "## Why\n",
        "\n".join(f"- {reason}" for reason in explain(record)) + "\n",
        "## What changes\n",
        _format_changes(record),
        *(["## The finals\n", _finals_table(record)] if record.finals else []),
        "## Variants\n",
        _variants_table(record),
        "## All measurements\n",
        _tried_table(record),
        _list_untried(record),
        "## How it was measured\n",
        _describe_method(record),
    ]
    return "\n".join(part for part in parts if part)


def verdict(record: TuneRecord) -> str:
    if record.winner is None:
        return "Interrupted: nothing was decided and nothing was changed."
    unmet = ""
    if not record.is_met and record.finals:
        unmet = f" No configuration has a p99 within {record.p99_ms:g} ms; this one is the closest."
    if record.is_shipped_best:
        return f"No other settings were better than yours.{unmet}"
    found = _find_final(record, record.winner)
    gain = f"{found.over_shipped:.2f} times the throughput of the shipped settings" if found else ""
    if found and not record.is_met:
        gain = f"a p99 of {found.p99_ms:.1f} ms"
    return f"{record.winner}: {gain}.{unmet}"


def _format_summary(record: TuneRecord) -> str:
    objective = ["the most throughput"]
    if record.p99_ms is not None:
        objective.append(f"with a p99 of at most {record.p99_ms:g} ms")
    if record.min_accuracy is not None:
        objective.append(f"with a {record.accuracy_measure} of at least {record.min_accuracy:g}")
    load = record.load
    return (
        f"**{verdict(record)}**\n\n"
        f"Objective: {', '.join(objective)}, under {load['concurrency']} callers over {load['protocol']} with "
        f"{load['items']} item(s) per request. Shipped: {record.shipped} (version {record.version}). "
        f"{record.started}, {record.seconds / 60:.1f} minutes.\n"
    )


def explain(record: TuneRecord) -> list[str]:
    """Explain the choice of the winner: its lead over each finalist, and the noise of the measurements."""
    if record.winner is None or record.best is None:
        return ["The run was interrupted before the finals. The measurements until then are in the report."]
    reasons = []
    winner, shipped = _find_final(record, record.winner), _find_final(record, record.shipped)
    if winner and not record.is_shipped_best:
        rates = f"{winner.rate:.1f}/s" + (f" compared with {shipped.rate:.1f}/s" if shipped else "")
        reasons.append(
            f"The winner reached {rates} in {record.rounds} rounds: {winner.over_shipped:.2f} times as much in the "
            f"same rounds; a lead of {winner.noise:.0%} would be noise."
        )
    if any(each.name == str(record.shipped.variant) and each.left_out for each in record.variants):
        reasons.append("The shipped variant is below the minimum accuracy, so it could not be chosen.")
    if not record.finals:
        reasons.append("No other configuration reached the finals.")
    if record.is_shipped_best and record.best != record.winner and shipped:
        reasons.append(
            f"The fastest configuration, {record.best}, leads by {shipped.lead_of_best - 1:.1%}. "
            f"A lead within {shipped.noise:.1%} is noise here, so the shipped settings stay."
        )
    elif record.best != record.winner and winner:
        reasons.append(
            f"{record.best} was ahead by {winner.lead_of_best - 1:.1%}, which is within the noise "
            f"({winner.noise:.1%}). Among equals the one with the fewest changes wins, then the most accurate one."
        )
    elif record.best == record.shipped and record.finals:
        reasons.append("Nothing was faster in the finals.")
    if not record.is_met and record.finals:
        reasons.append(
            f"No finalist had a p99 within {record.p99_ms:g} ms. They are ranked by p99 instead of throughput."
        )
    elif record.p99_ms is not None:
        slow = [final for final in record.finals if not final.is_within]
        reasons += [f"{final.configuration}: p99 {final.p99_ms:.1f} ms is over {record.p99_ms:g} ms." for final in slow]
    return reasons


def _format_changes(record: TuneRecord) -> str:
    if record.winner is None or record.is_shipped_best:
        return "Nothing.\n"
    lines = [f"- {NAMES.get(key, key)}: `{key}: {_format_value(value)}`" for key, value in record.changes.items()]
    if record.winner.variant.is_converted and record.winner.precision != record.shipped.precision:
        lines.append(f"- the file: converted to {record.winner.precision}, as a new version of the model")
    return "\n".join(lines) + "\n\n" + _format_applied(record)


def _format_applied(record: TuneRecord) -> str:
    applied = record.applied
    if applied is None:
        return "The changes were not written into the model.\n"
    parts = []
    if applied.new_folder:
        parts.append(f"Version {applied.version} was converted from version {record.version}.\n")
    if applied.diff:
        parts.append(f"```diff\n{applied.diff.rstrip()}\n```\n")
    undo = [f"cp {backup} {file}" if backup else f"rm {file}" for file, backup in applied.files.items()]
    if applied.new_folder:
        undo.append(f"rm -r {applied.new_folder}")
    parts.append("To undo the changes:\n\n```\n" + "\n".join(undo) + "\n```\n")
    return "\n".join(parts)


def _finals_table(record: TuneRecord) -> str:
    rows = []
    for final in record.finals:
        rate, over, p99 = _format_figures(final)
        equality = f"yes, within {final.noise:.1%}" if final.is_equal else f"no, {final.lead_of_best - 1:.1%} behind"
        rows.append((final.configuration, rate, p99, over, equality, _describe_role(record, final)))
    return _format_table(("configuration", "items/s", "p99 ms", "vs shipped", "equal to the best", ""), rows)


def _format_figures(result: Final | TriedConfiguration) -> tuple[str, str, str]:
    return f"{result.rate:.1f}", f"{result.over_shipped:.3f}", f"{result.p99_ms:.1f}"


def _describe_role(record: TuneRecord, final: Final) -> str:
    roles = [("winner", record.winner), ("shipped", record.shipped)]
    found = [name for name, configuration in roles if configuration == final.configuration]
    return ", ".join([*found, *(["over the p99"] if record.is_met and not final.is_within else [])])


def _variants_table(record: TuneRecord) -> str:
    rows = []
    for variant in record.variants:
        accuracy = (
            "" if variant.accuracy is None else f"{variant.measure} {variant.accuracy:.5g} {variant.unit}".strip()
        )
        rows.append((variant.name, accuracy, variant.left_out or "tried"))
    return _format_table(("variant", "accuracy", ""), rows)


def _tried_table(record: TuneRecord) -> str:
    measured = [each for each in record.tried if not each.failed]
    rows = [(each.configuration, each.windows, *_format_figures(each)) for each in measured]
    failed = [f"- {each.configuration}: {each.failed}" for each in record.tried if each.failed]
    names = ("configuration", "windows", "items/s", "vs shipped", "p99 ms")
    found = _format_table(names, rows) if rows else "Nothing.\n"
    return found + ("\nFailed:\n\n" + "\n".join(failed) + "\n" if failed else "")


def _list_untried(record: TuneRecord) -> str:
    if not record.untried:
        return ""
    return "Not tried for lack of time:\n\n" + "\n".join(f"- {each}" for each in record.untried) + "\n"


def _describe_method(record: TuneRecord) -> str:
    noise = "" if record.noise is None else f" The standard deviation of such a ratio was {record.noise:.1%}."
    machine = ", ".join(f"{key} {value}" for key, value in record.machine.items())
    return (
        "Every configuration had its own server, and only one server had load at a time. Configurations took turns in "
        "rounds, and every round included the shipped configuration. The figures in the column `vs shipped` are ratios "
        f"within rounds, so that a slow minute of the machine affects both sides.{noise} Only the finals decide. "
        f"A lead counts if it exceeds three standard errors of its median and 3%.\n\nMachine: {machine}.\n"
    )


def _find_final(record: TuneRecord, configuration: Configuration) -> Final | None:
    return next((final for final in record.finals if final.configuration == configuration), None)


def _format_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join(format_markdown_table(names, rows)) + "\n"


def _format_value(value: object) -> str:
    return "null" if value is None else str(value)
