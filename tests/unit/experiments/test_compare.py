"""Comparison of two results: differences within noise are not called differences."""

import random

import pytest

from penstock.experiments.compare import compare, to_markdown
from penstock.experiments.results import Results
from tests.measured import make_cases, make_results, make_text

ONE, EIGHT = "minilm-onnx-fp32-cpu-b1-c1", "minilm-onnx-fp32-cpu-b1-c8"


def verdicts(a: Results, b: Results) -> dict[str, tuple[str, str]]:
    return {case.case: (case.throughput.verdict, case.p99.verdict) for case in compare(a, b).cases}


def test_a_difference_beyond_noise_is_reported_with_its_direction() -> None:
    a = make_results({ONE: [100, 102, 98], EIGHT: [400, 404, 396]}, {ONE: [10, 10.2, 9.8], EIGHT: [20, 20.4, 19.6]})
    b = make_results({ONE: [150, 152, 148], EIGHT: [300, 303, 297]}, {ONE: [30, 30.6, 29.4], EIGHT: [5, 5.1, 4.9]})
    assert verdicts(a, b) == {ONE: ("better", "worse"), EIGHT: ("worse", "better")}
    found = compare(a, b)
    assert found.has_worse
    assert found.cases[0].throughput.ratio == pytest.approx(1.5)
    assert found.cases[0].p99.ratio == pytest.approx(3.0)


def test_the_same_difference_within_noise_is_not_reported() -> None:
    a = make_results({ONE: [100, 140, 70]})
    b = make_results({ONE: [150, 100, 120]})
    assert verdicts(a, b) == {ONE: ("no difference", "no difference")}
    assert not compare(a, b).has_worse


def test_repeats_that_agree_by_chance_do_not_make_a_few_percent_significant() -> None:
    a = make_results({ONE: [100, 100, 100]}, {ONE: [10, 10, 10]})
    b = make_results({ONE: [96, 96, 96]}, {ONE: [10.9, 10.9, 10.9]})
    assert verdicts(a, b) == {ONE: ("no difference", "no difference")}


def test_the_noise_of_other_cases_applies_to_a_quiet_case() -> None:
    quiet = {ONE: [100, 100, 100]}, {ONE: [112, 112, 112]}
    noisy = {EIGHT: [100, 200, 50]}
    assert verdicts(*map(make_results, quiet))[ONE][0] == "better"
    assert verdicts(*(make_results({**numbers, **noisy}) for numbers in quiet))[ONE][0] == "no difference"


def test_two_runs_of_the_same_system_agree() -> None:
    rng = random.Random(5)
    cases = make_cases(experiment={"batch_sizes": [1, 2, 4, 8], "concurrency_levels": list(range(1, 14))})

    def run() -> Results:
        rates = {case.id: [100 * rng.lognormvariate(0, 0.06) for _ in range(3)] for case in cases}
        tails = {case.id: [10 * rng.lognormvariate(0, 0.15) for _ in range(3)] for case in cases}
        return make_results(rates, tails, cases)

    changes = [
        compare_figures for case in compare(run(), run()).cases for compare_figures in (case.throughput, case.p99)
    ]
    assert len(changes) == 104
    assert sum(compare_figures.verdict != "no difference" for compare_figures in changes) <= 2


def test_single_repeats_give_no_verdict() -> None:
    a, b = make_results({ONE: [100]}), make_results({ONE: [10]})
    assert verdicts(a, b) == {ONE: ("unknown", "unknown")}
    assert not compare(a, b).has_worse


def test_other_machines_settings_and_cases_are_reported() -> None:
    a = make_results({ONE: [100, 101], EIGHT: [100, 101]}, machine="an old one")
    b = make_results({ONE: [100, 101]}, machine="a new one")
    b.settings = {**a.settings, "batching": {"max_rows": 4}}
    found = compare(a, b)
    assert found.differences == ("machine processor: an old one → a new one", "settings batching.max_rows: – → 4")
    assert (found.only_in_a, found.only_in_b) == ((EIGHT,), ())
    text = to_markdown(found)
    assert "an old one → a new one" in text
    assert f"Measured only in A: {EIGHT}." in text
    assert "3 standard errors" in text


def test_variants_of_one_model_are_matched_by_their_load() -> None:
    fast = make_cases(model={"precision": "int8"}, experiment={"concurrency_levels": [1, 8]})
    a = make_results({ONE: [100, 101, 99]})
    b = make_results({"minilm-onnx-int8-cpu-b1-c1": [200, 201, 199]}, cases=fast)
    (case,) = compare(a, b).cases
    assert case.case == f"{ONE} → minilm-onnx-int8-cpu-b1-c1"
    assert case.throughput.verdict == "better"


def test_two_variants_under_one_load_are_not_matched() -> None:
    both = make_cases(matrix={"precision": ["int8", "fp16"], "concurrency": [1]})
    a = make_results({ONE: [100, 101]})
    b = make_results({case.id: [200, 201] for case in both}, cases=both)
    found = compare(a, b)
    assert not found.cases
    assert (found.only_in_a, len(found.only_in_b)) == ((ONE,), 2)


def test_first_tokens_and_token_intervals_are_compared_if_both_have_them() -> None:
    a, b = make_results({ONE: [100, 102, 98], EIGHT: [400, 404, 396]}), make_results({ONE: [100, 101, 99]})
    assert "first token" not in to_markdown(compare(a, b))
    for results, first_ms in ((a, 80.0), (b, 160.0)):
        for number, repeat in enumerate(results.cases[0].repeats):
            repeat.generation = make_text(100.0, first_ms + number, 20.0 + number)
    found = compare(a, b)
    first, between = found.cases[0].first_token, found.cases[0].between_tokens
    assert first is not None
    assert between is not None
    assert (first.verdict, between.verdict) == ("worse", "no difference")
    assert found.has_worse
    assert "first token p99 A ms" in to_markdown(found)
