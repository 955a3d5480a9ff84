"""One experiment's file, run: its cases measured and its reports written, also where it is interrupted."""

from collections.abc import Callable
from pathlib import Path

from penstock.experiments.file import read_experiment
from penstock.experiments.report import to_html
from penstock.experiments.results import FILE, Results, read_results
from penstock.experiments.runner import ExperimentRunner, RunOptions
from penstock.experiments.table import to_markdown
from penstock.experiments.variants import Variants

REPORT = "report.html"


def run_experiment(
    file: Path, out: Path, variants: Variants, options: RunOptions, tell: Callable[[str], None]
) -> tuple[Results, Path]:
    """Returns the results and the folder that has them, in `out`."""
    experiment = read_experiment(file)
    # Short windows beside the long ones: a trial must not displace results to believe.
    folder = out / (f"{experiment.name}-quick" if options.is_quick else experiment.name)
    try:
        results = ExperimentRunner(experiment, variants, folder, options, tell).run()
    except KeyboardInterrupt:
        if (folder / FILE).is_file():
            _write_reports(read_results(folder), folder)
            tell(f"interrupted: what was measured is in {folder}; the same command goes on from there")
        raise
    _write_reports(results, folder)
    return results, folder


def _write_reports(results: Results, folder: Path) -> None:
    (folder / "results.md").write_text(to_markdown(results), encoding="utf-8")
    (folder / REPORT).write_text(to_html(results), encoding="utf-8")
