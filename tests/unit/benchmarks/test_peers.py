"""The peers' benchmark without its processes: order, resuming, settings, stamps, figures and verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import venvs
from benchmarks.peers.checks import find_fault
from benchmarks.peers.failures import InstallFailed
from benchmarks.peers.figures import NamedFigure, compute_named_figures
from benchmarks.peers.peer import BEST, MINILM, NOOP, SAME, Assets, Item, Launch, Setting
from benchmarks.peers.plan import (
    BY_HAND,
    GROUPS,
    MIXED,
    OFFERED,
    PENSTOCK,
    PHOTOS,
    QUERIES,
    SERVERS,
    TENSOR,
    Contender,
    PeerTurn,
    choose_kind,
    is_done,
    keep,
    make_search_group,
    plan_open_turns,
    plan_turns,
)
from benchmarks.peers.results import PeerResults, Record, WindowRow
from benchmarks.peers.roster import Entrant, candidates, contenders, load_entrant
from benchmarks.peers.search import Choice
from benchmarks.peers.summary import summarize
from benchmarks.peers.table import render
from benchmarks.peers.verdicts import ANY, P99, THROUGHPUT, Verdict, judge

BY_NAME = {group.name: group for group in GROUPS}
TEXT, TEXT_BEST, TENSORS, OPEN = (BY_NAME[name] for name in ("minilm", "minilm-best", "noop", "open"))
MACHINE = {"cores": 2, "processor": "a processor", "python": "3.11"}


class Adapter:
    """A peer of which only the settings matter."""

    name = title = "triton"
    grpc_method = "/a/b"

    def __init__(self, found: Mapping[str, Sequence[Setting]]) -> None:
        self._found = found

    def protocols(self, workload: str) -> Sequence[str]:
        return ("grpc", "rest")

    def settings(self, workload: str, comparison: str) -> Sequence[Setting]:
        return self._found.get(comparison, ())

    def refusal(self, workload: str, comparison: str) -> str:
        return "serves other things"

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        raise AssertionError("nothing is started here")

    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        raise AssertionError("nothing is sent here")

    def answer(self, workload: str, protocol: str, body: bytes) -> Any:
        raise AssertionError("nothing is answered here")


def contender(server: str, setting: str = "plain", kind: str = "") -> Contender:
    return Contender(server, server, ("rest",), Setting(setting, {"name": setting}), kind)


def measured(server: str, rps: Sequence[float], *, group: str = "minilm", **fields: Any) -> list[Record]:
    """Return one record per round, with one window each."""
    kind = fields.pop("kind", "")
    fields = {"load": MIXED, "protocol": "rest", "concurrency": 32, "p99_ms": 10.0, **fields}
    rows = [WindowRow(rps=value, **fields) for value in rps]
    return [Record(group, number, server, kind, server.title(), "plain", [row]) for number, row in enumerate(rows)]


def verdicts_of(records: Sequence[Record], figure: str, scope: str) -> list[Verdict]:
    return [one for one in judge(summarize(records)) if (one.figure, one.scope) == (figure, scope)]


def test_every_other_round_runs_backwards() -> None:
    found = plan_turns([replace(TEXT, rounds=3)], {"minilm": [contender(name) for name in "abc"]})
    assert [turn.contender.server for turn in found] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert [turn.number for turn in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_recorded_rounds_are_not_repeated() -> None:
    first, second = plan_turns([replace(TEXT, rounds=2)], {"minilm": [contender("a")]})
    records = [first.record([WindowRow(MIXED, "rest", 1, 5.0)])]
    assert is_done(first, records)
    assert not is_done(second, records)


def test_a_contender_that_never_completed_a_round_is_left_out() -> None:
    first, second, third = plan_turns([replace(TEXT, rounds=3)], {"minilm": [contender("a")]})
    assert is_done(second, [first.record([], "not ready")])
    good = first.record([WindowRow(MIXED, "rest", 1, 5.0)])
    assert not is_done(third, [good, second.record([], "not ready")])


def test_resuming_keeps_results_that_were_measured_under_the_same_conditions() -> None:
    row = [WindowRow(MIXED, "rest", 1, 5.0)]
    (now,) = plan_turns([replace(TEXT, rounds=1)], {"minilm": [contender("a", "new")]})
    kept = now.record(row)
    stale = replace(kept, setting="old")
    failed = replace(kept, number=1, failure="not ready")
    elsewhere = replace(stale, group="noop")
    assert keep([kept, stale, failed, elsewhere], [now]) == [kept, elsewhere]


def test_rates_are_shares_of_the_best_peers_peak() -> None:
    names = (PENSTOCK, "kserve", "mlserver", "triton")
    peaks = plan_turns([OPEN], {"open": [contender(name) for name in names]})
    assert [turn.contender.server for turn in peaks] == [*names]
    assert {level.name for turn in peaks for level in turn.group.levels} == {MIXED}
    rps = {PENSTOCK: 300.0, "kserve": 150.0, "mlserver": 100.0, "triton": 200.0}
    records = [turn.record([WindowRow(MIXED, "rest", 32, rps[turn.contender.server])]) for turn in peaks]
    found = plan_open_turns([OPEN], peaks, records)
    assert [turn.contender.server for turn in found[:3]] == ["kserve", "triton", PENSTOCK]
    assert len(found) == 3 * OPEN.rounds
    levels = found[0].group.levels
    assert [(level.name, level.rate) for level in levels] == [
        (f"{MIXED} at 50%", 100.0),
        (f"{MIXED} at 70%", 140.0),
        (f"{MIXED} at 90%", 180.0),
    ]
    assert not any(is_done(turn, records) for turn in found)
    assert plan_open_turns([OPEN], peaks, records[1:]) == []  # no peer to compare with


def test_results_survive_saving_and_loading(tmp_path: Path) -> None:
    results = PeerResults(0.5, measured("triton", [10.0, 11.0], rejected={"503": 2}), MACHINE)
    results.save(tmp_path / "deep" / "peers.json")
    assert PeerResults.load(tmp_path / "deep" / "peers.json") == results


def test_the_search_measures_one_window_per_group() -> None:
    found = {
        group.name: [(level.load, level.concurrency) for level in make_search_group(group).levels]
        for group in GROUPS
        if group is not OPEN
    }
    text, photos = [(MIXED, 32)], [(PHOTOS, 8)]
    assert found == {
        "minilm": text,
        "minilm-best": text,
        "srcnn": photos,
        "srcnn-best": photos,
        "noop": [(TENSOR, 32)],
    }


def test_the_search_keeps_the_fastest_candidate_with_right_answers(tmp_path: Path) -> None:
    slow, fast, wrong = (contender("triton", name) for name in ("slow", "fast", "wrong"))
    choice = Choice()
    for one, rps, failure in ((slow, 5.0, ""), (fast, 9.0, ""), (wrong, 99.0, "wrong answer")):
        turn = PeerTurn(TEXT, 0, one)
        choice.add(one, turn.record([] if failure else [WindowRow(MIXED, "rest", 32, rps)], failure))
    choice.save(tmp_path / "settings.json")
    found = Choice.load(tmp_path / "settings.json")
    settings = [one.setting for one in (slow, fast, wrong) if one.setting]
    assert found.winner(["minilm"], "triton", settings).name == "fast"
    assert found.winner(["minilm"], "kserve", settings).name == "slow", "without measurements the first setting wins"
    assert [entry.is_winner for entry in found.found["minilm"]["triton"]] == [False, True, False]
    assert found.has("minilm", fast, rounds=1)
    assert not found.has("minilm", wrong, rounds=1), "failures are tried again"
    assert not found.has("minilm", contender("triton", "other"), rounds=1)


def test_a_recorded_winner_that_is_no_longer_a_candidate_is_not_used() -> None:
    gone = contender("triton", "gone")
    choice = Choice()
    choice.add(gone, PeerTurn(TEXT, 0, gone).record([WindowRow(MIXED, "rest", 32, 9.0)]))
    assert choice.winner(["minilm"], "triton", [Setting("gone", {"name": "changed"}), Setting("b")]).values


def test_the_best_mode_measures_a_peer_as_offered_and_tuned_by_hand() -> None:
    plain, hand = Setting("plain"), Setting("hand", {"engine": "openvino"})
    entrant = Entrant("triton", Adapter({SAME: [plain], BEST: [hand]}), Path("python"))
    found = contenders(TEXT_BEST, [entrant], Choice())
    assert {(one.kind, one.setting_name) for one in found[1:]} == {(BY_HAND, "hand"), (OFFERED, "plain")}
    assert all(one.protocols == ("grpc",) for one in found[1:]), "each server uses its fastest protocol"
    assert contenders(TENSORS, [entrant], Choice())[0].protocols == ("grpc", "rest")
    assert choose_kind(PENSTOCK, BEST, hand) == ""


def test_a_peer_that_cannot_take_part_is_listed_with_the_reason() -> None:
    refuses = Entrant("triton", Adapter({}), Path("python"))
    broken = load_entrant("no_such_peer")
    assert contenders(TENSORS, [refuses], Choice()) == [Contender("triton", "triton", refusal="serves other things")]
    assert "ModuleNotFoundError" in candidates(TENSORS, broken)[0].failure


def test_penstock_has_several_settings_and_the_shipped_one_comes_first() -> None:
    entrant = load_entrant(PENSTOCK)
    for group in GROUPS:
        found = candidates(group, entrant)
        assert found[0].setting_name.startswith("as shipped")
        assert len(found) > 1
        assert {one.kind for one in found} == {""}


def test_a_peer_is_installed_while_its_venv_is_made_from_its_files(tmp_path: Path) -> None:
    folder, made = tmp_path / "peer", tmp_path / "venvs" / "peer"
    folder.mkdir()
    (folder / "requirements.txt").write_text("one==1\n")
    assert venvs.find_installed(folder, tmp_path / "venvs") is None
    (made / "bin").mkdir(parents=True)
    (made / "bin" / "python").touch()
    (made / venvs.STAMP).write_text(venvs.compute_stamp(folder))
    assert venvs.find_installed(folder, tmp_path / "venvs") == made / "bin" / "python"
    (folder / "requirements.txt").write_text("one==2\n")
    assert venvs.find_installed(folder, tmp_path / "venvs") is None


def test_the_stamp_changes_with_the_requirements_of_the_venv(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("a==1\n")
    first = venvs.compute_stamp(tmp_path)
    (tmp_path / "server.py").write_text("")
    assert venvs.compute_stamp(tmp_path) == first
    (tmp_path / "apt.txt").write_text("default-jre\n")
    second = venvs.compute_stamp(tmp_path)
    (tmp_path / "requirements.txt").write_text("a==2\n")
    assert len({first, second, venvs.compute_stamp(tmp_path)}) == 3


def test_requirements_are_installed_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("requirements.10.txt", "requirements.2.txt", "requirements.0.txt", "apt.txt", "requirements-dev.txt"):
        (tmp_path / name).touch()
    found = [file.name for file in venvs.list_requirement_files(tmp_path)]
    assert found == ["requirements.0.txt", "requirements.2.txt", "requirements.10.txt"]


def test_a_failed_installation_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("a==1\n")
    (tmp_path / "interpreter").write_text("/no/such/python\n")
    with pytest.raises(InstallFailed, match="/no/such/python"):
        venvs.ensure_venv(tmp_path, tmp_path / "venvs")


def test_answers_must_be_close_to_the_reference() -> None:
    right = np.zeros(384, np.float32)
    right[0] = 1
    off = right.copy()
    off[1] = 0.01  # cosine 0.99995
    assert find_fault(MINILM, SAME, right, right) == ""
    assert find_fault(MINILM, BEST, off, right) == ""
    assert "0.99995" in find_fault(MINILM, SAME, off, right)
    assert "shape" in find_fault(MINILM, SAME, right[:10], right)
    assert find_fault(NOOP, SAME, right.reshape(1, -1), right.reshape(1, -1)) == ""
    assert find_fault(NOOP, SAME, off.reshape(1, -1), right.reshape(1, -1))


def test_figures_are_medians_of_the_rounds() -> None:
    (line,) = summarize(measured("triton", [10.0, 30.0, 20.0], generator_share=0.9, rejected={"503": 1}))
    assert (line.rps, line.spread) == (20.0, 0.5)
    assert line.notes == "3 refused with 503, load generator at 90% of a core"


def test_named_figures_are_taken_from_the_measured_results() -> None:
    window = {"group": "noop", "load": TENSOR, "protocol": "grpc"}
    records = measured(PENSTOCK, [6.0, 9.0, 7.0], **window) + measured("triton", [8.0, 10.0, 10.0], **window)
    records += measured(PENSTOCK, [99.0], concurrency=64, **window) + measured("kserve", [99.0], **window)
    records += measured(PENSTOCK, [99.0], **(window | {"protocol": "rest"}))
    assert compute_named_figures(summarize(records)) == {"noop_grpc_over_triton": NamedFigure(0.7, 0.7)}
    assert "| `noop_grpc_over_triton` | 0.70 | ≥ 0.7 |" in render(PeerResults(1.0, records, MACHINE))


def test_latencies_at_given_rates_become_named_figures() -> None:
    records = []
    for share, ours in (("50", 8.0), ("70", 11.0), ("90", 9.5)):
        window: dict[str, Any] = {"group": "open", "load": f"{MIXED} at {share}%", "concurrency": 64}
        records += measured(PENSTOCK, [50.0], p99_ms=ours, **window) + measured("kserve", [50.0], p99_ms=10.0, **window)
    found = compute_named_figures(summarize(records))
    assert {key.removeprefix("open_p99_over_peer"): (each.value, each.bar) for key, each in found.items()} == {
        "_50": (0.8, 1.0),
        "_70": (1.1, 1.0),
        "_90": (0.95, 0.9),
        "": (1.1, 1.0),
    }
    assert "| `open_p99_over_peer_90` | 0.95 | ≤ 0.9 |" in render(PeerResults(1.0, records, MACHINE))


def test_the_bar_is_compared_with_the_best_peer() -> None:
    records = measured(PENSTOCK, [22.0, 24.0], p99_ms=8.0) + measured("triton", [20.0, 20.0], p99_ms=12.0)
    records += measured("kserve", [10.0, 10.0], p99_ms=10.0)
    (throughput,) = verdicts_of(records, THROUGHPUT, ANY)
    assert (throughput.best.server, throughput.ratio, throughput.outcome) == ("triton", 1.15, "met")
    assert (throughput.low, throughput.high) == (1.1, 1.2)
    (latency,) = verdicts_of(records, P99, ANY)
    assert (latency.best.server, latency.ratio, latency.outcome) == ("kserve", 0.8, "met")
    slower = measured(PENSTOCK, [21.0], p99_ms=9.5) + measured("triton", [20.0])
    assert [one.outcome for one in judge(summarize(slower)) if one.scope == "rest"] == ["MISSED", "MISSED"]


def test_only_equal_protocols_are_compared_and_streams_are_not() -> None:
    own = measured(PENSTOCK, [10.0]) + measured(PENSTOCK, [30.0], protocol="grpc")
    own += measured(PENSTOCK, [99.0], protocol="stream")
    records = own + measured("triton", [20.0])
    assert [one.ratio for one in verdicts_of(records, THROUGHPUT, "rest")] == [0.5]
    assert verdicts_of(records, THROUGHPUT, "grpc") == []
    assert [one.ratio for one in verdicts_of(records, THROUGHPUT, ANY)] == [1.5]


def test_the_best_mode_is_judged_against_both_kinds_of_settings() -> None:
    records = measured(PENSTOCK, [30.0], group="minilm-best")
    records += measured("triton", [10.0], group="minilm-best", kind=OFFERED)
    records += measured("triton", [20.0], group="minilm-best", kind=BY_HAND)
    found = {one.best.kind: (one.ratio, one.outcome) for one in verdicts_of(records, THROUGHPUT, ANY)}
    assert found == {OFFERED: (3.0, "met"), BY_HAND: (1.5, "MISSED")}


def test_only_the_noop_has_a_bar_and_other_cases_report_the_leader() -> None:
    tensor = {"group": "noop", "load": TENSOR}
    even = measured(PENSTOCK, [10.0], **tensor) + measured("triton", [10.0], **tensor)
    assert [one.outcome for one in verdicts_of(even, THROUGHPUT, "rest")] == ["MISSED"]
    unbarred = measured(PENSTOCK, [9.0], concurrency=1) + measured("triton", [10.0], concurrency=1)
    assert [one.outcome for one in verdicts_of(unbarred, THROUGHPUT, "rest")] == ["behind"]


def test_queries_have_their_own_bar() -> None:
    window: dict[str, Any] = {"load": QUERIES, "concurrency": 64}
    records = measured(PENSTOCK, [19.0], **window) + measured("triton", [10.0], **window)
    (found,) = verdicts_of(records, THROUGHPUT, "rest")
    assert found.bar is not None
    assert (found.bar.value, found.outcome) == (2.0, "MISSED")


def test_the_report_shows_every_contender_and_the_reasons_of_failed_ones() -> None:
    records = measured(PENSTOCK, [22.0, 24.0]) + measured("triton", [10.0, 10.0])
    records.append(Record("minilm", 0, "ceiling", "", "in process", "", [WindowRow(MIXED, "", 0, 55.0)]))
    records.append(Record("minilm", 0, "kserve", "", "KServe", "plain", [], "not ready within 90 s: a | b"))
    records.append(Record("minilm", 0, "infinity", "", "infinity", "", [], refusal="serves other files"))
    report = render(PeerResults(1.0, records, MACHINE))
    assert "| infinity |  |  | takes no part: serves other files |" in report
    assert "| Penstock | plain | rest |  |  | 23.0 · 0.00 · 10.0 |  |  |" in report
    assert "| KServe | plain |  | failed: not ready within 90 s: a \\| b |" in report
    assert "| in process |  |  | 55.0 | 55.0 | 55.0 | 55.0 |  |" in report
    assert "| mixed | 32 | Triton | plain | rest | 10.0 | 0% | 0.00 | 10.0 | 0.00 | 0 |  |" in report
    assert "| 2.30 | 2.20–2.40 | ≥ 1.1 | met |" in report
    widths = {line.count(" | ") for line in report.splitlines() if line.startswith("| minilm |")}
    assert len(widths) == 1


def test_every_server_is_named_once() -> None:
    assert len(set(SERVERS)) == len(SERVERS) == 9
