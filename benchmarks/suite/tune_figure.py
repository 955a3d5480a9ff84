"""The figure of tuning: three runs on the shipped model, and the winner compared with the shipped settings."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.suite.figures import SuiteFigure, ratio
from benchmarks.suite.repository import SHIPPED
from penstock.experiments.load.choice import LoadData, build_payloads, fetch_model_metadata
from penstock.experiments.tuning.model import TuneModel
from penstock.experiments.tuning.search import FINALS
from penstock.experiments.tuning.servers import TuneLoad, TuneServers
from penstock.experiments.tuning.space import Configuration
from penstock.experiments.tuning.trials import Trials
from penstock.experiments.tuning.tune import TuneOptions, TuneProgress, Tuner
from penstock.experiments.variants import Variants
from penstock.models.folder import read_model_folder

KEY = "tune_over_shipped"
RUNS = 3
MINUTES, QUICK_MINUTES = 6.0, 2.0
WINDOW_S, QUICK_WINDOW_S = 2.0, 1.0
ROUNDS, QUICK_ROUNDS = 9, 5


def measure_tuning(
    models: Path, folder: Path, *, quick: bool, say: Callable[[str], None]
) -> tuple[list[SuiteFigure], dict[str, float | str]]:
    """Return the figure; `models` is the shipped repository, which is not changed, and `folder` is scratch space."""
    path = folder / "models" / SHIPPED
    shutil.copytree(models / SHIPPED, path)
    own = read_model_folder(path)
    model = TuneModel(own.of_version(own.versions[-1]), Variants(path.parent, folder / "variants"))
    window_s = QUICK_WINDOW_S if quick else WINDOW_S
    options = TuneOptions(
        QUICK_MINUTES if quick else MINUTES, load=TuneLoad(window_s=window_s, warm_up_s=0.3 * window_s)
    )
    winners = []
    for number in range(1, RUNS + 1):
        winners.append(Tuner(model, options, folder / f"run-{number}", _make_line_printer(say, number)).run().winner)
        say(f"tune run {number} of {RUNS}: {winners[-1]}")
    trials = _measure_rounds(model, winners, options.load, folder / "rounds", QUICK_ROUNDS if quick else ROUNDS)
    return [_make_figure(trials, winners)], _list_facts(trials, winners)


def find_most_common(winners: Sequence[Configuration]) -> Configuration:
    """Return the most frequent value, the first of several."""
    return Counter(winners).most_common(1)[0][0]


def _measure_rounds(
    model: TuneModel, winners: Sequence[Configuration], load: TuneLoad, folder: Path, count: int
) -> Trials:
    """Measure the shipped settings and every different winner in turns."""
    shipped = model.shipped()
    trials = Trials(shipped)
    contenders = list(dict.fromkeys([shipped, *winners]))
    if contenders == [shipped]:
        return trials
    folder.mkdir(parents=True)
    with TuneServers(model, folder, load) as servers:
        for contender in contenders:
            servers.start(contender)
        inputs = fetch_model_metadata(servers.start(shipped).http, model.folder.name)
        servers.set_payloads(build_payloads(LoadData(), model.folder.name, inputs))
        for contender in contenders:
            servers.measure_window(contender)  # what is not warm yet
        for number in range(count):
            order = contenders if number % 2 == 0 else contenders[::-1]
            trials.add(FINALS, {contender: servers.measure_window(contender) for contender in order})
    return trials


def _make_figure(trials: Trials, winners: Sequence[Configuration]) -> SuiteFigure:
    """Return the figure: exactly 1 if the shipped settings have won, because two windows would differ by noise."""
    winner = find_most_common(winners)
    if winner == trials.shipped:
        return SuiteFigure(KEY, 1.0, 0.0, 1.0)
    found, base = (trials.measures(each) for each in (winner, trials.shipped))
    return ratio(KEY, [measure.rate for measure in found], [measure.rate for measure in base], 1.0)


def _list_facts(trials: Trials, winners: Sequence[Configuration]) -> dict[str, float | str]:
    chosen = find_most_common(winners)
    others = [each for each in dict.fromkeys(winners) if each != chosen]
    apart = [each for each in others if _is_apart(trials, chosen, each)]
    return {
        **{f"tune_winner_{number}": str(winner) for number, winner in enumerate(winners, 1)},
        "tune_shipped": str(trials.shipped),
        "tune_same_winners": float(winners.count(chosen)),
        "tune_winners_apart": float(len(apart)),  # different ones that are not equal within noise
        **{f"tune_winner_over_{each}": trials.compare(chosen, each, FINALS).ratio for each in others},
    }


def _is_apart(trials: Trials, first: Configuration, second: Configuration) -> bool:
    return trials.compare(first, second, FINALS).is_better or trials.compare(second, first, FINALS).is_better


def _make_line_printer(say: Callable[[str], None], number: int) -> Callable[[TuneProgress], None]:
    """Return a function that prints a line for each stage."""
    stages: list[str] = []

    def print_stage(progress: TuneProgress) -> None:
        if progress.stage and progress.stage not in stages:
            stages.append(progress.stage)
            say(f"tune run {number}: {progress.stage}" + (f"; best so far {progress.best}" if progress.best else ""))

    return print_stage
