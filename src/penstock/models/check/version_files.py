"""Checks the files of a model's version without loading them."""

import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from penstock.core.errors import ConfigError
from penstock.models.check.findings import Finding, command, dangling_link, unreadable
from penstock.models.model_yaml import DEFAULT_FILES, NETWORK_ENGINES, ModelSettings
from penstock.tasks.built_in import describe_task, tasks_for_engine

HEAD_BYTES = 512
_CONVERT = "No engine can read it: export the model to ONNX, or write a Python model that loads it (engine: python)."
# The engine of each file suffix, and below the suffixes that no engine reads.
_ENGINES = {
    **dict.fromkeys((".pt", ".pt2", ".ts", ".torchscript"), "torch"),
    **dict.fromkeys((".onnx", ".ort"), "onnx"),
    ".py": "python",
    ".xml": "openvino",
    ".gguf": "genai",
}
_UNSERVED = (
    *(".safetensors", ".pth", ".ckpt", ".tflite", ".pb", ".h5", ".keras"),
    *(".plan", ".engine", ".pkl", ".joblib", ".npz", ".bin"),
)
_PICKLES = (".pth", ".ckpt", ".pkl", ".bin")
_PICKLE = (
    "It is not loaded, because it is a pickle, which may run code while it is read. Save the whole model with "
    "torch.jit.save as model.pt, or with torch.export.save as model.pt2: docs/torch-models.md."
)
_LABELS = "Write one label per line, in the order of the network's output"
_LFS = b"version https://git-lfs.github.com/spec/"
_MAGIC = (
    (b"PK\x03\x04", "a zip archive, as torch.save, torch.jit.save and torch.export write", "Try engine: torch."),
    (b"\x80\x02", "a Python pickle, as old torch.save writes", "Export the model to ONNX or TorchScript."),
    (b"\x1f\x8b", "a gzip archive", "Unpack it: gunzip, or tar -xzf."),
    (b"GGUF", "a GGUF file", "Set task: generate and engine: genai in model.yaml."),
    (b"\x89HDF", "an HDF5 file, as Keras writes", _CONVERT),
    (b"MZ", "a Windows program", "It is not a model: download it again."),
    (b"\x7fELF", "a program", "It is not a model: download it again."),
)


def is_model_file(path: Path) -> bool:
    return path.suffix in (*_ENGINES, *_UNSERVED) and not path.is_dir() and path.name not in ("setup.py", "conftest.py")


def explain_missing_file(folder: Path, settings: ModelSettings) -> Finding:
    """Return a finding for a version's folder without the model's file, with advice that depends on its other files."""
    file = folder / settings.file
    if file.is_symlink():
        return dangling_link(file)
    if file.is_dir():
        return Finding("missing_file", f"{file} is a folder, not a file", "Put the file itself there.")
    try:
        names = sorted(child.name for child in folder.iterdir())
    except OSError as error:
        return unreadable(folder, error)
    there = f"it has {', '.join(names[:8])}{' …' if len(names) > 8 else ''}" if names else "it is empty"
    return Finding(
        "missing_file", f"{folder} has no {settings.file}; {there}", _advise_on_missing_file(folder, settings)
    )


def _advise_on_missing_file(folder: Path, settings: ModelSettings) -> str:
    candidates = [child for child in sorted(folder.iterdir()) if is_model_file(child)]
    own = Path(settings.file).suffix
    alike = [child for child in candidates if child.suffix == own]
    if len(alike) == 1:
        rename = command("mv", alike[0], folder / settings.file)
        return f"Set file: {alike[0].name} in model.yaml, or rename it: {rename}"
    if alike:
        return f"Set the file in model.yaml, for example file: {alike[0].name}"
    for child in candidates:
        if engine := _ENGINES.get(child.suffix):
            named = "" if child.name in (*DEFAULT_FILES.values(), "model.onnx") else f" and file: {child.name}"
            if (tasks := tasks_for_engine(engine)) and ModelSettings().task not in tasks:
                engine = f"{engine}, task: {tasks[0]}"
            return f"{child.name} is for another engine: set engine: {engine}{named} in model.yaml"
    if (folder / "modules.json").is_file():
        return "This is a sentence-transformers folder: set engine: torch and file: modules.json in model.yaml"
    if any(child.suffix == ".safetensors" for child in candidates):
        return (
            "Weights alone are not a model. If they are a sentence encoder's, import them: "
            f"{command('penstock', 'model', 'import', 'NAME', '--source', folder)}"
        )
    if candidates:
        return f"{candidates[0].name}: {_PICKLE if candidates[0].suffix in _PICKLES else _CONVERT}"
    nested = next((child for child in sorted(folder.rglob(f"*{own}")) if own and child.is_file()), None)
    if nested:
        return f"It is in a deeper folder: {command('mv', nested, folder / settings.file)}"
    return f"Put the model's file there, or set its name in model.yaml: file: NAME (now {settings.file})"


def examine_files(folder: Path, settings: ModelSettings) -> list[Finding]:
    """Check the files of a version whose model file exists."""
    file = folder / settings.file
    found = list(_examine_bytes(file, settings))
    if not found and settings.engine in NETWORK_ENGINES and file.suffix not in (".xml", ".ort"):
        found += _examine_network(file)
    if not found and settings.engine == "torch" and file.suffix == ".pt":
        found += _examine_script(file)
    if not found and settings.engine == "python":
        found += _examine_source(file)
        found += _examine_requirements(file)
    if not found and settings.engine == "genai":
        found += _examine_generator(file)
    found += _examine_tokenizer(folder, settings)
    found += _examine_labels(folder, settings)
    return found


def _examine_bytes(file: Path, settings: ModelSettings) -> Iterator[Finding]:
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES)
    except OSError as error:
        yield unreadable(file, error)
        return
    start = head.lstrip().lower()
    if not head:
        yield Finding("empty_file", f"{file} is empty", "Copy or download it again.")
    elif head.startswith(_LFS):
        advice = "Fetch the file itself: git lfs install && git lfs pull"
        yield Finding("lfs_pointer", f"{file} is a Git LFS pointer, not the model", advice)
    elif start.startswith((b"<!doctype html", b"<html")):
        advice = "Download the file itself: on a hub, use the 'raw' or 'resolve' link, which may need a login."
        yield Finding("html_file", f"{file} is a web page (HTML), not the model", advice)
    elif settings.engine in NETWORK_ENGINES and file.suffix != ".xml":
        if start.startswith((b'{"', b"<?xml", b"error", b"not found", b"access denied")):
            beginning = start[:60].decode(errors="replace")
            yield Finding("wrong_format", f"{file} is text, not a model: {beginning!r}", "Download it again.")
        for magic, what, advice in _MAGIC:
            if head.startswith(magic):
                yield Finding("wrong_format", f"{file} is {what}, not ONNX", advice)


def _examine_network(file: Path) -> Iterator[Finding]:
    from penstock.engines.onnx.onnx_network import NO_DATA, NO_NETWORK, SHORT_DATA, TORN, examine_onnx

    codes = {
        TORN: ("truncated_file", "Copy or download it again, and compare its size with the original's."),
        NO_NETWORK: ("wrong_format", "Export the model to ONNX, or set the engine that reads this file: engine: NAME."),
        NO_DATA: ("missing_data", f"Put it into {file.parent}: the ONNX file and its data belong together."),
        SHORT_DATA: ("truncated_file", "Copy or download it again, together with the ONNX file."),
    }
    for kind, message in examine_onnx(file):
        yield Finding(codes[kind][0], message, codes[kind][1])


def _examine_script(file: Path) -> Iterator[Finding]:
    """Check that a .pt file is TorchScript; other PyTorch formats are zip archives, too, but cannot be loaded."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = {PurePosixPath(name).name for name in archive.namelist()}
    except (OSError, ValueError, zipfile.BadZipFile):
        yield Finding("wrong_format", f"{file} is not a PyTorch file, or is incomplete", f"Copy it again. {_PICKLE}")
        return
    if "constants.pkl" in names:
        return
    if "archive_format" in names:
        new = file.with_suffix(".pt2")
        advice = f"Rename it, {command('mv', file, new)}, and set file: {new.name} in model.yaml"
        yield Finding(
            "wrong_format", f"{file} was written by torch.export.save, but a .pt file must be TorchScript", advice
        )
    else:
        yield Finding("wrong_format", f"{file} was written by torch.save", _PICKLE)


def _examine_generator(file: Path) -> Iterator[Finding]:
    from penstock.engines.genai.gguf_facts import TOKENIZER_FILES, read_facts

    try:
        read_facts(file)
    except ConfigError as error:
        yield Finding("wrong_format", error.message, "Copy or download it again, with all files beside it.")
    if file.suffix != ".gguf" and (missing := [name for name in TOKENIZER_FILES if not (file.parent / name).is_file()]):
        advice = "Create both with convert_tokenizer MODEL --with-detokenizer, from the package openvino-tokenizers."
        yield Finding("missing_tokenizer", f"{file.parent / missing[0]} is missing", advice)


def _examine_source(file: Path) -> Iterator[Finding]:
    from penstock.engines.python.python_model import CLASS

    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        message = f"{file}:{line}: is not valid Python: {getattr(error, 'msg', error)}"
        source = (getattr(error, "text", None) or "").strip()
        yield Finding("python_syntax", f"{message}: {source}" if source else message, "Correct that line.")
        return
    bound = {name for node in tree.body for name in _defined_names(node)}
    if CLASS not in bound and "*" not in bound:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        advice = (
            f"Add it with a method infer(self, inputs, context), or add a line {CLASS} = {(classes or ['NAME'])[0]}"
        )
        has = f"it has {', '.join(classes)}" if classes else "it has no class at all"
        yield Finding("python_class", f"{file} has no class {CLASS}; {has}", advice)


def _defined_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement defines, or '*' if the names are unknown."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
        yield "*"


def _examine_requirements(file: Path) -> Iterator[Finding]:
    from penstock.engines.python.requirements import check_requirements

    try:
        check_requirements(file)
    except ConfigError as error:
        install = error.fields.get("install")
        message = error.fields.get("missing", error.message)
        yield Finding("missing_requirement", message, f"Install them: {install}" if install else "Correct this line.")


def _examine_tokenizer(folder: Path, settings: ModelSettings) -> Iterator[Finding]:
    name = describe_task(settings.task).files(settings).tokenizer
    if not name:
        return
    file = folder / name
    if not file.is_file():
        names = [child.name for child in sorted(folder.iterdir()) if "token" in child.name or "vocab" in child.name]
        beside = f"; there is {', '.join(names)}" if names else ""
        advice = (
            "Copy the model's tokenizer.json there (the format of the tokenizers library). If the model has none, "
            "create it with transformers: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
        )
        yield Finding("missing_tokenizer", f"{file} is missing{beside}", advice)
        return
    if not file.stat().st_size or file.read_bytes()[: len(_LFS)] == _LFS:
        yield Finding("invalid_tokenizer", f"{file} is empty or a Git LFS pointer", "Copy it again; git lfs pull.")
        return
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        yield Finding("invalid_tokenizer", f"{file} is not JSON: {error}", "Copy it again.")
        return
    if not (isinstance(document, dict) and isinstance(document.get("model"), dict)):
        what = (
            "looks like a tokenizer_config.json or vocab.json"
            if isinstance(document, dict)
            else "has an unknown format"
        )
        advice = "The right file is called tokenizer.json and has a key 'model'."
        yield Finding("invalid_tokenizer", f"{file} is not a file of the tokenizers library; it {what}", advice)


def _examine_labels(folder: Path, settings: ModelSettings) -> Iterator[Finding]:
    name = describe_task(settings.task).files(settings).labels
    if not name:
        return
    file = folder / name
    if not file.is_file():
        advice = f"{_LABELS}."
        yield Finding("missing_labels", f"{file} is missing", advice)
        return
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield Finding("invalid_labels", f"{file} cannot be read as UTF-8 text: {error}", "Save it as UTF-8.")
        return
    if not text.strip():
        yield Finding("invalid_labels", f"{file} is empty", f"{_LABELS}.")
    elif text.lstrip().startswith(("{", "[")):
        yield Finding("invalid_labels", f"{file} is JSON", f"{_LABELS}.")
