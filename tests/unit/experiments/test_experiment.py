"""Experiment files: documented keys, inheritance, refusals with their line, and the resulting cases."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.experiments.case_run import do_thirds_agree, has_enough_answers
from penstock.experiments.experiment import Case, Experiment, digest, expand
from penstock.experiments.experiment_file import find_experiments, read_experiment
from penstock.experiments.load.latencies import Latencies
from penstock.experiments.load.load_process import WindowOutcome
from penstock.experiments.results import CaseResult
from penstock.experiments.runner import plan_turns
from tests.measured import AS_IN_THE_SEED, make_cases, make_repeat

SHIPPED = Path(__file__).parents[3] / "experiments"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def cases_of(file: Path) -> list[Case]:
    return expand(read_experiment(file), lambda model: "openvino")


def test_the_documented_example_is_accepted_as_written(tmp_path: Path) -> None:
    write(
        tmp_path, "base_config.yaml", "server: {host: 0.0.0.0, port: 50051}\nexperiment: {concurrency_levels: [2, 4]}\n"
    )
    file = write(tmp_path, "mine.yaml", AS_IN_THE_SEED)
    experiment = read_experiment(file)
    assert experiment.name == "my_experiment"
    assert experiment.experiment.benchmark_requests == 100
    assert experiment.server.grpc_port == 50051
    found = cases_of(file)
    assert [(case.batch_size, case.concurrency) for case in found] == [(1, 2), (1, 4), (4, 2), (4, 4), (8, 2), (8, 4)]
    assert {(case.model, case.engine, case.precision, case.device) for case in found} == {
        ("minilm", "torch", "fp32", "mps")
    }
    assert {case.unit for case in found} == {"pairs"}


def test_pytorch_is_an_alias_of_the_torch_engine_everywhere(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "mine.yaml",
        "matrix: {backend: [onnx, pytorch], precision: [fp32, bf16], exclude: [{engine: pytorch, precision: fp32}]}\n"
        "experiment: {concurrency_levels: [1]}\n",
    )
    assert {(case.engine, case.precision) for case in cases_of(file)} == {
        ("onnx", "fp32"),
        ("onnx", "bf16"),
        ("torch", "bf16"),
    }


def test_the_precision_of_a_torch_model_needs_no_other_engine(tmp_path: Path) -> None:
    file = write(tmp_path, "mine.yaml", "matrix: {precision: [bf16, fp16], device: [cpu, cuda]}\n")
    assert {case.engine for case in expand(read_experiment(file), lambda model: "torch")} == {"torch"}


def test_sections_are_merged_and_lists_replaced_along_a_chain(tmp_path: Path) -> None:
    write(tmp_path, "base_config.yaml", "description: base\nexperiment: {batch_sizes: [1, 2, 3], repeats: 5}\n")
    write(tmp_path, "middle.yaml", "name: middle\nexperiment: {window_s: 1}\nbatching: {max_batch_size: 4}\n")
    file = write(tmp_path, "last.yaml", "extends: middle.yaml\nexperiment: {batch_sizes: [7]}\n")
    found = read_experiment(file)
    part = found.experiment
    assert (part.batch_sizes, part.repeats, part.window_s) == ((7,), 5, 1.0)
    assert found.batching.model_dump(exclude_unset=True) == {"max_rows": 4}
    assert (found.name, found.description) == ("last", "")  # never inherited


def test_extends_null_means_no_base(tmp_path: Path) -> None:
    write(tmp_path, "base_config.yaml", "experiment: {repeats: 5}\n")
    assert read_experiment(write(tmp_path, "a.yaml", "extends: null\n")).experiment.repeats == 3
    assert read_experiment(write(tmp_path, "b.yaml", "model: {name: srcnn}\n")).experiment.repeats == 5


def test_a_cycle_of_extends_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    write(tmp_path, "b.yaml", "extends: a.yaml\n")
    with pytest.raises(ConfigError, match=r"cycle: a\.yaml → b\.yaml → a\.yaml"):
        read_experiment(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("model:\n  name: minilm\n  colour: red\n", 3, "unknown key 'model.colour'"),
        ("experiment:\n  batch_sizes: [1, 0]\n", 2, "greater than or equal to 1"),
        ("experiment:\n  batch_sizes: []\n", 2, "at least 1 item"),
        ("matrix:\n  engine: [onnx]\n  speed: [1]\n", 3, "unknown key 'matrix.speed'"),
        ("matrix:\n  engine: [onnx]\n  exclude: [{wheel: 1}]\n", 1, "unknown key 'wheel'"),
        ("model:\n  device: tpu\n", 2, "'cpu', 'cuda' or 'mps'"),
        ("model:\n  quantized: true\n  precision: fp32\n", 1, "contradicts"),
        ("name: [\n", 2, "not valid YAML"),
    ],
)
def test_invalid_files_are_refused_with_file_and_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    file = write(tmp_path, "wrong.yaml", text)
    with pytest.raises(ConfigError) as caught:
        read_experiment(file)
    assert f"{file}:{line}: " in caught.value.message
    assert message in caught.value.message


def test_an_error_in_a_base_names_the_base(tmp_path: Path) -> None:
    base = write(tmp_path, "base_config.yaml", "server:\n  prot: 1\n")
    with pytest.raises(ConfigError, match=r"unknown key 'server\.prot'") as caught:
        read_experiment(write(tmp_path, "a.yaml", "name: a\n"))
    assert (caught.value.fields["file"], caught.value.fields["line"]) == (str(base), "2")


def test_contradictions_between_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "base_config.yaml", "model: {precision: bf16}\n")
    with pytest.raises(ConfigError, match="with inherited settings: model: quantized: true contradicts"):
        read_experiment(write(tmp_path, "a.yaml", "model: {quantized: true}\n"))


def test_quantized_means_int8_on_a_cpu_and_fp16_on_a_gpu() -> None:
    found = make_cases(matrix={"quantized": [False, True], "device": ["cpu", "cuda", "mps"], "concurrency": [1]})
    assert [(case.device, case.precision) for case in found] == [
        ("cpu", "fp32"),
        ("cuda", "fp32"),
        ("mps", "fp32"),
        ("cpu", "int8"),
        ("cuda", "fp16"),
        ("mps", "fp16"),
    ]


def test_a_matrix_has_every_combination_except_the_excluded_ones() -> None:
    matrix = {
        "engine": ["onnx", "openvino"],
        "precision": ["fp32", "bf16"],
        "instances": [1, 2],
        "max_tokens": [256, None],
        "batch_size": [1, 8],
        "concurrency": [4],
        "exclude": [{"engine": "onnx", "precision": "bf16"}, {"instances": 2, "batch_size": [8, 9]}],
    }
    found = make_cases(matrix=matrix)
    assert len(found) == (2 * 2 - 1) * 2 * (2 * 2 - 1)
    assert len({case.id for case in found}) == len(found)
    assert not [case for case in found if case.engine == "onnx" and case.precision == "bf16"]
    assert not [case for case in found if case.instances == 2 and case.batch_size == 8]
    assert found[1].id == "minilm-onnx-fp32-cpu-instances=1-max_tokens=256-b8-c4"
    assert {case.batching["max_tokens"] for case in found} == {256, None}
    assert len({case.server_id for case in found}) == 3 * 2 * 2


def test_an_empty_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="excludes every case"):
        make_cases(matrix={"engine": ["onnx"], "exclude": [{"engine": "onnx"}]})


def test_a_case_id_does_not_depend_on_the_rest_of_the_experiment() -> None:
    few = make_cases(experiment={"concurrency_levels": [8]})
    many = make_cases(experiment={"concurrency_levels": [1, 8], "batch_sizes": [1, 2], "repeats": 9})
    assert {case.id for case in few} == {"minilm-onnx-fp32-cpu-b1-c8"} < {case.id for case in many}


def test_the_hash_covers_everything_that_affects_results() -> None:
    def hash_of(**sections: object) -> str:
        return digest(Experiment.model_validate(sections).settings())

    plain = hash_of(name="a")
    assert hash_of(name="b", description="other words", experiment={"repeats": 9}) == plain
    assert hash_of(name="a", batching={"max_rows": 32}) != plain  # overrides the model's own file
    assert hash_of(name="a", experiment={"window_s": 1}) != plain


def test_repeats_alternate_and_every_other_round_runs_backwards() -> None:
    cases = make_cases(matrix={"precision": ["fp32", "int8"], "concurrency": [1, 2]})
    results = [CaseResult(case=case, unit="pairs") for case in cases]
    turns = plan_turns(results, 2)
    assert [(turn.repeat, [case.id for case in turn.cases]) for turn in turns] == [
        (1, [cases[0].id, cases[1].id]),
        (1, [cases[2].id, cases[3].id]),
        (2, [cases[3].id, cases[2].id]),
        (2, [cases[1].id, cases[0].id]),
    ]


def test_only_missing_repeats_are_run() -> None:
    cases = make_cases(matrix={"precision": ["fp32", "int8"], "concurrency": [1, 2]})
    results = [CaseResult(case=case, unit="pairs") for case in cases]
    results[0].repeats = [make_repeat(1, 5.0, 1.0), make_repeat(2, 5.0, 1.0)]
    results[1].repeats = [make_repeat(1, 5.0, 1.0)]
    results[2].not_run = results[3].not_run = "no such device"
    assert [(turn.repeat, [case.id for case in turn.cases]) for turn in plan_turns(results, 2)] == [(2, [cases[1].id])]


def outcome(answered: int, latency_s: float = 0.01, **rejected: int) -> WindowOutcome:
    return WindowOutcome(0.5, answered, rejected, Latencies([latency_s] * answered))


def test_a_counted_run_ends_after_its_answers_or_if_everything_is_refused() -> None:
    assert not has_enough_answers([outcome(40), outcome(59)], 100)
    assert has_enough_answers([outcome(40), outcome(60)], 100)
    assert has_enough_answers([outcome(40), outcome(0, FULL=7)], 100)
    assert not has_enough_answers([outcome(0)], 100)  # slow, not refused


def test_a_counted_run_is_stable_if_its_thirds_agree() -> None:
    assert do_thirds_agree([outcome(10), outcome(12), outcome(11), outcome(11), outcome(12), outcome(10)])
    assert not do_thirds_agree([outcome(10), outcome(10), outcome(20), outcome(20), outcome(10), outcome(10)])
    assert not do_thirds_agree([outcome(10), outcome(10)])
    assert not do_thirds_agree([outcome(10), outcome(10), outcome(10, latency_s=0.02)])


def test_every_shipped_experiment_can_be_read() -> None:
    names = [file.stem for file in find_experiments(SHIPPED)]
    assert {"minilm_baseline", "minilm_quantized", "minilm_onnx", "minilm_matrix", "srcnn_baseline"} < set(names)
    for file in find_experiments(SHIPPED):
        experiment = read_experiment(file)
        assert experiment.name == file.stem
        assert experiment.description
        assert cases_of(file)


def test_cases_of_generating_models_have_text_lengths(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "mine.yaml",
        "model: {name: writer}\nexperiment: {concurrency_levels: [2], output_tokens: 16, goodput: {ttft: 500}}\n"
        "matrix: {prompt_tokens: [32, 64-128], stream: [true, false]}\n",
    )
    experiment = read_experiment(file)
    found = expand(experiment, lambda model: "genai", lambda model: "prompts")
    assert [(case.prompt_tokens, case.output_tokens, case.stream) for case in found] == [
        ("32", "16", True),
        ("32", "16", False),
        ("64-128", "16", True),
        ("64-128", "16", False),
    ]
    assert {(case.unit, case.precision) for case in found} == {("tokens", "auto")}
    assert len({case.id for case in found}) == 4
    assert experiment.experiment.bounds == {"ttft": 500.0}
    assert experiment.settings()["experiment"]["goodput"] == {"ttft": 500.0}


def test_cases_of_other_models_have_no_text_lengths() -> None:
    assert not {"prompt_tokens", "output_tokens", "stream", "goodput"} & Experiment().settings()["experiment"].keys()


def test_an_open_loop_has_rates_instead_of_concurrency() -> None:
    cases = make_cases(experiment={"request_rates": [0.5, 20]})
    assert [(case.id[-7:], case.concurrency, case.rate) for case in cases] == [
        ("b1-r0.5", 0, 0.5),
        ("-b1-r20", 0, 20.0),
    ]
    assert [case.rate for case in make_cases(matrix={"rate": [3]})] == [3.0]
    with pytest.raises(ConfigError, match="set one of them"):
        make_cases(experiment={"request_rates": [1]}, matrix={"concurrency": [1]})
