"""TorchScript and torch.export files: inputs, outputs, refusals and errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from penstock.core.errors import ConfigError, DeviceOutOfMemory, EngineFailed, InvalidTensor, PenstockError
from penstock.core.signature import DeclaredTensor
from penstock.core.tensors import NUMPY_TYPES, Array
from penstock.engines.engine_options import TorchOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.torch.torch_engine import TorchEngine

# PyTorch recommends files made with torch.export; TorchScript files still have to be served.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

WIDTH = 8
NOTHING = TorchOptions()
X: Array = np.random.default_rng(1).standard_normal((5, WIDTH)).astype(np.float32)
Tensors = Sequence[tuple[str, str, tuple[int, ...]]]


class Perceptron(nn.Module):
    """A model with one layer; `form` is the type of its output: a tensor, a tuple, a list or a dict."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.Linear(64, 3)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        y = self.second(self.norm(torch.relu(self.first(x)).to(torch.float32)))
        total = x.sum(1)
        return {"tensor": y, "tuple": (y, total), "list": [y, total], "dict": {"y": y, "total": total}}[self.form]


class TakeAway(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - b


class Echo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def save_script(path: Path, module: nn.Module, *examples: torch.Tensor) -> Path:
    torch.jit.trace(module.eval(), examples, strict=False, check_trace=False).save(str(path))
    return path


def save_program(path: Path, module: nn.Module, *examples: torch.Tensor, least: int = 0, most: int = 1024) -> Path:
    rows = torch.export.Dim("rows", min=least or 1, max=most)
    shapes = tuple({0: rows} for _ in examples)
    torch.export.save(torch.export.export(module.eval(), examples, dynamic_shapes=shapes), path)
    return path


def save(path: Path, module: nn.Module, *examples: torch.Tensor) -> Path:
    return (save_program if path.suffix == ".pt2" else save_script)(path, module, *examples)


def options(inputs: Tensors = (), outputs: Tensors = (), **others: bool) -> TorchOptions:
    def made(tensors: Tensors) -> tuple[DeclaredTensor, ...]:
        return tuple(DeclaredTensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in tensors)

    return TorchOptions(inputs=made(inputs), outputs=made(outputs), **others)


PLAIN = options([("x", "FP32", (-1, WIDTH))], [("y", "FP32", (-1, 3))])
BOTH = options([("x", "FP32", (-1, WIDTH))], [("y", "FP32", (-1, 3)), ("total", "FP32", (-1,))])


def engine(file: Path, given: TorchOptions = NOTHING, precision: str = "auto") -> TorchEngine:
    return TorchEngine(EngineSpec(file, precision, 1, 2), given)


def loaded(file: Path, given: TorchOptions = NOTHING, precision: str = "auto") -> TorchEngine:
    made = engine(file, given, precision)
    made.load()
    return made


def expected(form: str = "tensor") -> Any:
    with torch.no_grad():
        return Perceptron(form)(torch.from_numpy(X))


@pytest.fixture(params=["model.pt", "model.pt2"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


# --- outputs


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("model.pt", "tuple"), ("model.pt", "dict")),  # a trace returns no list
        *(("model.pt2", "tuple"), ("model.pt2", "list"), ("model.pt2", "dict")),
    ],
)
def test_outputs_have_the_names_of_the_module(tmp_path: Path, name: str, form: str) -> None:
    made = loaded(save(tmp_path / name, Perceptron(form), torch.zeros(2, WIDTH)), BOTH)
    found = made.infer(0, {"x": X}, ["total", "y"])
    assert [array.shape for array in found] == [(5,), (5, 3)]
    y, total = expected(form).values() if form == "dict" else expected(form)
    assert np.allclose(found[0], total.numpy(), atol=1e-6)
    assert np.allclose(found[1], y.numpy(), atol=1e-6)
    assert [array.shape for array in made.infer(1, {"x": X}, [])] == [(5, 3), (5,)]


def test_a_scripted_module_with_branches_can_return_a_list(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(this, x: torch.Tensor, scale: float = 2.0) -> list[torch.Tensor]:  # noqa: N805 - as the file has it
            return [x * scale] if bool(x.sum() > 0) else [x, x]

    torch.jit.script(Branches()).save(str(tmp_path / "model.pt"))
    made = loaded(tmp_path / "model.pt", options([("x", "FP32", (-1,))], [("y", "FP32", (-1,))]))
    assert made.infer(0, {"x": np.ones(2, np.float32)}, ["y"])[0].tolist() == [2, 2]
    with pytest.raises(EngineFailed, match=r"returned 2 outputs \(0, 1\), but torch.outputs has y"):
        made.infer(0, {"x": -np.ones(2, np.float32)}, ["y"])


def test_the_signature_reports_the_file_type_and_precision(path: Path) -> None:
    signature = engine(save(path, Perceptron(), torch.zeros(2, WIDTH)), PLAIN).load()
    assert (signature.platform, signature.precision, signature.device) == ("pytorch_libtorch", "fp32", "cpu")
    assert [(spec.name, spec.datatype, spec.shape) for spec in (*signature.inputs, *signature.outputs)] == [
        ("x", "FP32", (-1, WIDTH)),
        ("y", "FP32", (-1, 3)),
    ]


def test_an_exported_program_contains_its_whole_signature(tmp_path: Path) -> None:
    def told(form: str, given: TorchOptions = NOTHING) -> list[tuple[str, str, tuple[int, ...]]]:
        file = save_program(tmp_path / f"{form}.pt2", Perceptron(form), torch.zeros(2, WIDTH))
        signature = engine(file, given).load()
        assert [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs] == [("x", "FP32", (-1, WIDTH))]
        return [(spec.name, spec.datatype, spec.shape) for spec in signature.outputs]

    assert told("tensor") == [("output", "FP32", (-1, 3))]
    assert told("tuple") == [("output_0", "FP32", (-1, 3)), ("output_1", "FP32", (-1,))]
    assert told("dict") == [("y", "FP32", (-1, 3)), ("total", "FP32", (-1,))]
    # Renamed by position, or selected by their own names.
    assert [name for name, *_ in told("dict", options((), [("a", "FP32", (-1, 3)), ("b", "FP32", (-1,))]))] == [
        "a",
        "b",
    ]
    assert told("dict", options((), [("total", "FP32", (-1,))])) == [("total", "FP32", (-1,))]


def test_renamed_or_reordered_outputs_are_matched(path: Path) -> None:
    file = save(path, Perceptron("dict"), torch.zeros(2, WIDTH))
    x = ("x", "FP32", (-1, WIDTH))
    turned = loaded(file, options([x], [("total", "FP32", (-1,)), ("y", "FP32", (-1, 3))]))
    assert [array.shape for array in turned.infer(0, {"x": X}, [])] == [(5,), (5, 3)]
    other = loaded(file, options([x], [("a", "FP32", (-1, 3)), ("b", "FP32", (-1,))]))
    assert [array.shape for array in other.infer(0, {"x": X}, ["b", "a"])] == [(5,), (5, 3)]


def test_inputs_are_matched_by_name_and_otherwise_by_position(path: Path) -> None:
    file = save(path, TakeAway(), torch.zeros(2, 1), torch.zeros(2, 1))
    one, two = np.full((1, 1), 7, np.float32), np.full((1, 1), 3, np.float32)
    y = [("y", "FP32", (-1, 1))]
    by_name = loaded(file, options([("b", "FP32", (-1, 1)), ("a", "FP32", (-1, 1))], y))
    assert by_name.infer(0, {"a": one, "b": two}, [])[0].item() == 4
    by_place = loaded(file, options([("p", "FP32", (-1, 1)), ("q", "FP32", (-1, 1))], y))
    assert by_place.infer(0, {"p": one, "q": two}, [])[0].item() == 4


@pytest.mark.parametrize("datatype", list(NUMPY_TYPES))
@pytest.mark.parametrize("is_readonly", [False, True])
def test_every_datatype_round_trips(tmp_path: Path, datatype: str, is_readonly: bool) -> None:
    file = save_script(tmp_path / "model.pt", Echo(), torch.zeros(2, 2))
    made = loaded(file, options([("x", datatype, (-1, -1))], [("y", datatype, (-1, -1))]))
    sent = np.arange(6).reshape(2, 3).astype(NUMPY_TYPES[datatype])
    sent.flags.writeable = not is_readonly
    (found,) = made.infer(0, {"x": sent}, ["y"])
    assert found.dtype == sent.dtype
    assert np.array_equal(found, sent)


@pytest.mark.parametrize("turned", [X[::-1], X[:, ::-2], X.T[:WIDTH].T, X[:0]])
def test_arrays_can_have_any_memory_layout(tmp_path: Path, turned: Array) -> None:
    made = loaded(
        save_script(tmp_path / "model.pt", Echo(), torch.zeros(2, 2)),
        options([("x", "FP32", (-1, -1))], [("y", "FP32", (-1, -1))]),
    )
    assert np.array_equal(made.infer(0, {"x": turned}, [])[0], turned)


def test_a_model_that_writes_to_its_input_does_not_change_the_request(tmp_path: Path) -> None:
    class Clears(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.zero_()

    made = loaded(
        save_script(tmp_path / "model.pt", Clears(), torch.ones(2, 2)),
        options([("x", "FP32", (-1, -1))], [("y", "FP32", (-1, -1))]),
    )
    raw = X.tobytes()
    sent = np.frombuffer(raw, np.float32).reshape(X.shape)
    assert not made.infer(0, {"x": sent}, [])[0].any()
    assert raw == X.tobytes()


def test_a_loaded_model_does_not_depend_on_its_file(path: Path) -> None:
    made = loaded(save(path, Perceptron(), torch.zeros(2, WIDTH)), PLAIN)
    (before,) = made.infer(0, {"x": X}, [])
    with path.open("r+b") as file:  # in place, as `cp` writes
        file.write(bytes(path.stat().st_size))
    assert np.array_equal(made.infer(0, {"x": X}, [])[0], before)


# --- precision


def test_bf16_results_are_close_to_fp32_and_returned_as_fp32(path: Path) -> None:
    file = save(path, Perceptron(), torch.zeros(2, WIDTH))
    half = engine(file, PLAIN, "bf16")
    assert half.load().precision == "bf16"
    (found,) = half.infer(0, {"x": X}, ["y"])
    assert found.dtype == np.float32
    assert not np.array_equal(found, expected().numpy())
    assert np.allclose(found, expected().numpy(), atol=0.05)


def test_large_weights_are_stored_in_bf16(path: Path) -> None:
    half = loaded(save(path, Perceptron(), torch.zeros(2, WIDTH)), PLAIN, "bf16")
    kinds = {name: weight.dtype for name, weight in half._model.module.named_parameters()}
    assert {name for name, dtype in kinds.items() if dtype == torch.bfloat16} == {"first.weight", "second.weight"}


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_recurrent_and_convolutional_modules_run_in_bf16(path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.position = nn.Embedding(10, 8), nn.Parameter(torch.randn(4, 8))
            self.conv, self.norm, self.lstm = (
                nn.Conv1d(8, 8, 3, padding=1),
                nn.BatchNorm1d(8),
                nn.LSTM(8, 8, batch_first=True),
            )

        def forward(self, x: torch.Tensor) -> Any:
            y = self.norm(self.conv((self.words(x) + self.position).transpose(1, 2)))
            return self.lstm(y.transpose(1, 2))[0] @ self.position.T

    file = save(path, Mixed(), torch.zeros(2, 4, dtype=torch.int64))
    given = options([("x", "INT64", (-1, 4))], [("y", "FP32", (-1, 4, 4))])
    ids = np.arange(12).reshape(3, 4) % 10
    (whole,), (half,) = (loaded(file, given, name).infer(0, {"x": ids}, []) for name in ("fp32", "bf16"))
    assert half.dtype == np.float32
    assert np.allclose(whole, half, atol=0.05)


def test_a_file_in_bf16_runs_as_it_is_and_in_nothing_else(path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x)

    file = save(path, Half(), torch.zeros(2, WIDTH, dtype=torch.bfloat16))
    given = options([("x", "BF16", (-1, WIDTH))], [("y", "BF16", (-1, 3))])
    for precision in ("auto", "bf16"):
        made = engine(file, given, precision)
        assert made.load().precision == "bf16"
        assert made.infer(0, {"x": X.astype(ml_dtypes.bfloat16)}, [])[0].dtype == ml_dtypes.bfloat16
    with pytest.raises(ConfigError, match="its weights are in bf16, so it cannot run in fp32; use precision: auto"):
        engine(file, given, "fp32").load()


# --- refusals while loading


def test_the_error_for_a_script_without_shapes_shows_an_example_with_its_names(tmp_path: Path) -> None:
    file = save_script(tmp_path / "model.pt", TakeAway(), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ConfigError) as raised:
        engine(file).load()
    told = raised.value.message
    assert "model.yaml needs torch.inputs and torch.outputs" in told
    assert "- {name: a, datatype: FP32, shape: [-1, 4]}\n    - {name: b," in told
    with pytest.raises(ConfigError, match=r"needs torch\.outputs, with"):
        engine(file, options([("a", "FP32", (-1,)), ("b", "FP32", (-1,))])).load()
    with pytest.raises(ConfigError, match=r"torch\.inputs has a, but model\.pt takes a, b"):
        engine(file, options([("a", "FP32", (-1,))], [("y", "FP32", (-1,))])).load()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (options([("x", "BYTES", (-1,))]), "'x' is BYTES, which PyTorch does not support"),
        (options((), [("y", "FP64", (-1, 3))]), r"'y' is FP32 \[-1, 3\] in the file, not FP64"),
        (options((), [("y", "FP32", (-1, 4))]), r"not FP32 \[-1, 4\]"),
        (options((), [("a", "FP32", (-1, 3)), ("b", "FP32", (-1,))]), "the file has output; list all of these names"),
    ],
)
def test_contradictions_between_model_yaml_and_file_are_refused(tmp_path: Path, given: TorchOptions, said: str) -> None:
    file = save_program(tmp_path / "model.pt2", Perceptron(), torch.zeros(2, WIDTH))
    with pytest.raises(ConfigError, match=said):
        engine(file, given).load()


class Trap:
    """A class that runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["model.pt", "model.pt2", "model.pth", "pytorch_model.bin", "model.ckpt"])
def test_pickles_are_not_loaded(tmp_path: Path, name: str) -> None:
    torch.save({"weights": torch.zeros(2), "trap": Trap(tmp_path / "sprung")}, tmp_path / name)
    with pytest.raises(ConfigError, match="pickle" if name != "model.pt2" else "cannot load it"):
        engine(tmp_path / name, PLAIN).load()
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.onnx", "is not an ONNX file"),
        ("model.safetensors", "only weights; set file to the modules.json or config.json"),
        ("model.txt", r"engine: torch reads model\.pt \(TorchScript\)"),
        ("model.pt", "is not a TorchScript file"),
        ("model.pt2", "PyTorch cannot load it"),
    ],
)
def test_another_file_type_is_refused_with_advice(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(b"no model at all")
    with pytest.raises(ConfigError, match=said):
        engine(tmp_path / name, PLAIN).load()


def test_scripts_and_exported_programs_are_distinguished(tmp_path: Path) -> None:
    program = save_program(tmp_path / "a.pt2", Perceptron(), torch.zeros(2, WIDTH))
    script = save_script(tmp_path / "b.pt", Perceptron(), torch.zeros(2, WIDTH))
    with pytest.raises(ConfigError, match=r"a file of torch.export.save must be named \.pt2"):
        engine(program.rename(tmp_path / "model.pt"), PLAIN).load()
    with pytest.raises(ConfigError, match="cannot load it"):
        engine(script.rename(tmp_path / "model.pt2"), PLAIN).load()


# --- refusals while running


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "missing input 'x'"),
        ({"x": X.astype(np.float64)}, "has dtype float64; the model takes FP32"),
        ({"x": X[:, :3]}, r"has shape \[5, 3\]; the model takes \[-1, 8\]"),
        ({"x": X[0]}, r"has shape \[8\]"),
        ({"x": np.array([["a"] * WIDTH], object)}, "has dtype object"),
    ],
)
def test_an_input_that_does_not_fit_is_the_callers_fault(path: Path, inputs: dict[str, Array], said: str) -> None:
    made = loaded(save(path, Perceptron(), torch.zeros(2, WIDTH)), PLAIN)
    with pytest.raises(InvalidTensor, match=said):
        made.infer(0, inputs, ["y"])
    assert made.infer(0, {"x": X}, ["y"])[0].shape == (5, 3)


@pytest.mark.parametrize(
    ("module", "x", "said"),
    [
        (Perceptron(), X[:, :3], "mat1 and mat2 shapes cannot be multiplied"),
        (nn.Embedding(4, 2), np.array([[9]]), "index out of range"),
        (nn.Conv2d(3, 1, 1), np.zeros((1, 4, 2, 2), np.float32), "to have 3 channels, but got 4"),
    ],
)
def test_an_input_that_the_module_refuses_is_the_callers_fault(
    tmp_path: Path, module: nn.Module, x: Array, said: str
) -> None:
    example = torch.from_numpy(X) if isinstance(module, Perceptron) else torch.from_numpy(x) * 0
    example = torch.zeros(1, 3, 2, 2) if isinstance(module, nn.Conv2d) else example
    datatype = "INT64" if x.dtype == np.int64 else "FP32"
    open_shape = (-1,) * x.ndim
    file = save_script(tmp_path / "model.pt", module, example)
    made = loaded(file, options([("x", datatype, open_shape)], [("y", "FP32", (-1, -1))]))
    with pytest.raises(InvalidTensor, match=f"the model rejects this input: .*{said}"):
        made.infer(0, {"x": x}, ["y"])


def test_unsupported_row_counts_of_a_program_are_the_callers_fault(tmp_path: Path) -> None:
    file = save_program(tmp_path / "model.pt2", Perceptron(), torch.zeros(3, WIDTH), least=2, most=4)
    made = loaded(file)
    assert made.infer(0, {"x": X[:4]}, [])[0].shape == (4, 3)
    with pytest.raises(InvalidTensor, match="Guard failed"):
        made.infer(0, {"x": X}, [])


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([("y", "FP64", (-1, 3))], "output 'y' of the model is torch.float32, but torch.outputs says FP64"),
        ([("y", "FP32", (-1, 4))], r"has shape \[5, 3\], but torch.outputs says \[-1, 4\]"),
        (
            [("y", "FP32", (-1, 3)), ("z", "FP32", (-1,))],
            r"returned 1 outputs \(a tensor\), but torch.outputs has y, z",
        ),
    ],
)
def test_wrong_entries_in_torch_outputs_are_reported(tmp_path: Path, outputs: Tensors, said: str) -> None:
    file = save_script(tmp_path / "model.pt", Perceptron(), torch.zeros(2, WIDTH))
    made = loaded(file, options([("x", "FP32", (-1, WIDTH))], outputs))
    with pytest.raises(EngineFailed, match=said):
        made.infer(0, {"x": X}, [])


def test_a_wrong_datatype_in_torch_inputs_is_not_the_callers_fault(tmp_path: Path) -> None:
    file = save_script(tmp_path / "model.pt", Perceptron(), torch.zeros(2, WIDTH))
    made = loaded(file, options([("x", "FP64", (-1, WIDTH))], [("y", "FP32", (-1, 3))]))
    with pytest.raises(EngineFailed, match=r"same dtype.*; check the datatypes in torch\.inputs"):
        made.infer(0, {"x": X.astype(np.float64)}, [])


def test_an_exception_of_the_module_is_a_failure_of_the_model(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool(x.sum() > 0):
                raise ValueError("no sun today")
            return x

    torch.jit.script(Fails()).save(str(tmp_path / "model.pt"))
    made = loaded(tmp_path / "model.pt", options([("x", "FP32", (-1,))], [("y", "FP32", (-1,))]))
    with pytest.raises(EngineFailed, match="no sun today"):
        made.infer(0, {"x": np.ones(2, np.float32)}, [])
    assert made.infer(0, {"x": np.zeros(2, np.float32)}, [])[0].tolist() == [0, 0]


def test_an_out_of_memory_error_gives_advice_and_the_engine_continues(tmp_path: Path) -> None:
    class Grows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(int(x[0]), 1 << 20).sum(1)

    torch.jit.script(Grows()).save(str(tmp_path / "model.pt"))
    made = loaded(tmp_path / "model.pt", options([("x", "INT64", (-1,))], [("y", "FP32", (-1,))]))
    with pytest.raises(DeviceOutOfMemory, match=r"cpu is out of memory.*: lower batching\.max_rows"):
        made.infer(0, {"x": np.array([1 << 30])}, [])
    assert made.infer(0, {"x": np.array([1])}, [])[0].tolist() == [0]


# --- torch.compile


def test_a_compiled_program_gives_the_same_results_for_any_number_of_rows(tmp_path: Path) -> None:
    class Waves(nn.Module):  # nothing that takes the compiler long
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) * 2

    made = loaded(save_program(tmp_path / "model.pt2", Waves(), torch.zeros(2, WIDTH)), options(compile=True))
    for rows in (2, 5, 3):
        assert np.allclose(made.infer(0, {"x": X[:rows]}, [])[0], np.sin(X[:rows]) * 2, atol=1e-5)


def test_a_script_cannot_be_compiled(tmp_path: Path) -> None:
    file = save_script(tmp_path / "model.pt", Perceptron(), torch.zeros(2, WIDTH))
    with pytest.raises(ConfigError, match=r"torch\.compile cannot compile a TorchScript file"):
        engine(file, PLAIN.model_copy(update={"compile": True})).load()


def test_a_failing_compiler_is_an_error_of_model_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    file = save_program(tmp_path / "model.pt2", Perceptron(), torch.zeros(2, WIDTH))
    with pytest.raises(ConfigError, match=r"torch\.compile fails: .*; remove torch\.compile"):
        engine(file, options(compile=True)).load()


def test_a_closed_engine_cannot_be_used_again(tmp_path: Path) -> None:
    made = loaded(
        save_script(tmp_path / "model.pt", Echo(), torch.zeros(1)),
        options([("x", "FP32", (-1,))] * 1, [("y", "FP32", (-1,))]),
    )
    made.warm_up({"x": np.zeros(1, np.float32)})
    made.close()
    made.close()
    with pytest.raises((AssertionError, PenstockError)):
        made.infer(0, {"x": np.zeros(1, np.float32)}, [])
