"""Mutation testing: changes a module in one place at a time, and runs its unit tests, which should then fail.

The operators are mutmut's, without those that change the wording of texts or pass None; assignments, calls and returned
values are removed too. mutmut itself neither draws samples nor changes constants and decorated functions.
"""

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "pyproject.toml")
TEST_LIMIT_S = 10  # the slowest test takes 2 s
RUN_LIMIT_S = 60.0

# By name: the module and its unit tests.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "placement": ("manager/placing/placement.py", ("manager/placing/test_placement.py",)),
    "rollout": (
        "features/rollouts/rollout.py",
        ("features/rollouts/test_rollout.py", "features/rollouts/test_rollout_simulation.py"),
    ),
    "evidence": (
        "features/rollouts/evidence.py",
        ("features/rollouts/test_evidence.py", "features/rollouts/test_rollout.py"),
    ),
    "leadership": ("manager/leading/leadership.py", ("manager/leading/test_leadership.py",)),
    "worker_liveness": ("manager/worker_liveness.py", ("manager/test_worker_liveness.py",)),
    "limits": ("features/limits/limits.py", ("features/limits/test_limits.py",)),
    "buckets": ("storage/limits/buckets.py", ("storage/limits/test_buckets.py",)),
    "evicted_buckets": ("storage/limits/evicted_buckets.py", ("storage/limits/test_buckets.py",)),
    "quotas": ("features/quotas/quotas.py", ("features/quotas/test_quotas.py",)),
    "directory_query": ("features/directory/directory_query.py", ("features/directory/test_directory_query.py",)),
    "directory_update": ("features/directory/directory_update.py", ("features/directory/test_directory_update.py",)),
    "tokens": ("endpoints/session_tokens.py", ("endpoints/test_session_tokens.py",)),
    "keys": ("features/keys/key_table.py", ("features/keys/test_key_table.py",)),
}

# Mutants that behave like the original: by name, (the changed line, the mutated line, the reason).
EQUIVALENT: dict[str, tuple[tuple[str, str, str], ...]] = {
    "buckets": (
        (
            "self.is_ahead = False  # this process took charges that the shared store does not know",
            "self.is_ahead = True  # this process took charges that the shared store does not know",
            "every caller of `_of` sets it",
        ),
    ),
    "placement": (
        (
            "if self._has_anti_affinity and len(self._machines[site.machine]) > 1:",
            "if self._has_anti_affinity and len(self._machines[site.machine]) >= 1:",
            "it only saves time: no other worker is on the machine",
        ),
        (
            "if self._has_anti_affinity and len(self._machines[site.machine]) > 1:",
            "if self._has_anti_affinity or len(self._machines[site.machine]) > 1:",
            "it only saves time: without anti-affinity nothing is near",
        ),
        (
            "if donor.level <= receiver.level or not (is_low or donor.level > HIGH * mean):",
            "if donor.level < receiver.level or not (is_low or donor.level > HIGH * mean):",
            "no block moves to a worker that is as full as its own",
        ),
        (
            "short = [block for block in self._blocks.values() if len(self._holders[block.block_id]) < block.replicas]",
            "short = [block for block in self._blocks.values() "
            "if len(self._holders[block.block_id]) <= block.replicas]",
            "it only saves time: a block with enough replicas gets no more",
        ),
        (
            "best, best_score = None, (True, (inf, inf, inf))",
            "best, best_score = None, (False, (inf, inf, inf))",
            "the first site is chosen whatever its score",
        ),
    ),
    "leadership": (
        (
            "self._epoch = 0  # like `_record`, but 0 once the lease may have expired",
            "self._epoch = 1  # like `_record`, but 0 once the lease may have expired",
            "the time of the first epoch is over",
        ),
    ),
    "rollout": (
        (
            "self._is_doubted = False",
            "self._is_doubted = True",
            "the first allowance does not depend on it",
        ),
    ),
    "evidence": (
        (
            "while now - self._slices[0].at > SPANS_S[-1]:",
            "while now - self._slices[0].at > SPANS_S[+1]:",
            "there are two spans",
        ),
        (
            "usual_s = compute_quantile_s(old.latencies, share) or 0.0",
            "usual_s = compute_quantile_s(old.latencies, share) or 1.0",
            "there are at least MIN_OLD latencies",
        ),
        (
            "found_s = compute_quantile_s(new.latencies, share) or 0.0",
            "found_s = compute_quantile_s(new.latencies, share) or 1.0",
            "there are at least MIN_LATENCIES latencies",
        ),
    ),
    "tokens": (
        (
            "if now < principal.expires_at:",
            "if now <= principal.expires_at:",
            "an expired token is removed right after",
        ),
    ),
}

# Do not shrink failing examples, which takes long.
RUN_TESTS = """
import sys, hypothesis, pytest
hypothesis.settings.register_profile("mutation", phases=[hypothesis.Phase.generate], database=None, derandomize=True)
hypothesis.settings.load_profile("mutation")
sys.exit(pytest.main(sys.argv[1:]))
"""
EMPTY = ("None", "False", "0", "0.0", '""', "[]", "()", "{}")  # replacing these with None often changes nothing
LARGE = 1000  # no behaviour depends on such a number being greater by one

LEFT_OUT = (
    mutators.operator_string,
    mutators.operator_assignment,
    mutators.operator_arg_removal,
    mutators.operator_dict_arguments,
)


@dataclass(frozen=True, slots=True)
class Mutant:
    line: int
    code: str  # of the whole module


def remove_statement(statement: cst.SimpleStatementLine) -> Iterator[cst.CSTNode]:
    match statement.body[0]:
        case (
            cst.Expr(value=cst.Call() | cst.Await())
            | cst.Assign(targets=[cst.AssignTarget(target=cst.Attribute() | cst.Subscript()), *_])
            | cst.AugAssign()
            | cst.Del()
        ):
            yield statement.with_changes(body=[cst.Pass()])
        case cst.Return(value=cst.BaseExpression() as value) if cst.Module([]).code_for_node(value) not in EMPTY:
            yield statement.with_changes(body=[cst.Return(cst.Name("None"))])


OPERATORS: mutators.OPERATORS_TYPE = [
    *((kind, operator) for kind, operator in mutators.mutation_operators if operator not in LEFT_OUT),
    (cst.SimpleStatementLine, remove_statement),
]


class Mutations(cst.CSTVisitor):
    """Collects pairs of a syntax node and its replacement, outside of annotations and decorators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        match node:
            case cst.Annotation() | cst.Decorator():
                return False
            case cst.Arg(keyword=cst.Name("strict")):  # guards against our own bugs
                return False
            case cst.Integer() if node.evaluated_value >= LARGE:
                return False
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                self.found += [(node, mutated) for mutated in operator(node)]
        return True


def mutants_of(source: str) -> list[Mutant]:
    wrapper = MetadataWrapper(cst.parse_module(source))
    lines, mutations = wrapper.resolve(PositionProvider), Mutations()
    wrapper.module.visit(mutations)
    found: dict[str, Mutant] = {}
    for node, mutated in mutations.found:
        changed = wrapper.module.deep_replace(node, mutated)
        assert isinstance(changed, cst.Module)
        found.setdefault(changed.code, Mutant(lines[node].start.line, changed.code))
    return list(found.values())


def is_equivalent(name: str, source: str, mutant: Mutant) -> bool:
    before, after = set(source.splitlines()), set(mutant.code.splitlines())
    changed = tuple("".join(line.strip() for line in lines) for lines in (before - after, after - before))
    return changed in {entry[:2] for entry in EQUIVALENT.get(name, ())}


class Copy:
    """A copy of the source and tests in which modules are changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in COPIED:
            if (ROOT / name).is_dir():
                skipped = shutil.ignore_patterns("__pycache__", ".venv*", "data")
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
            else:
                shutil.copy(ROOT / name, folder / name)

    def module(self, name: str) -> Path:
        return self._folder / "src/penstock" / MODULES[name][0]

    def is_killed(self, name: str, code: str) -> bool:
        """Run the module's tests against this code, and return whether they fail or take too long."""
        original = self.module(name).read_text()
        self.module(name).write_text(code)
        tests = [f"tests/unit/{test}" for test in MODULES[name][1]]
        options = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-o")
        try:
            done = subprocess.run(
                [sys.executable, "-B", "-c", RUN_TESTS, "-qx", *options, f"timeout={TEST_LIMIT_S}", *tests],
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": str(self._folder / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                capture_output=True,
                timeout=RUN_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return True
        finally:
            self.module(name).write_text(original)
        return done.returncode != 0


def diff_of(source: str, mutant: Mutant) -> str:
    lines = difflib.unified_diff(source.splitlines(), mutant.code.splitlines(), lineterm="", n=0)
    return "\n".join(f"    {line}" for line in lines if line[:2] not in ("--", "++", "@@"))


def run_modules(copy: Copy, names: Sequence[str], seed: int, count: int | None) -> bool:
    """Print the survivors and the share of killed mutants, and return whether the unchanged modules pass."""
    all_killed = all_run = 0
    for name in names:
        source = copy.module(name).read_text()
        if copy.is_killed(name, source):
            print(f"{name}: its tests fail without a change")
            return False
        mutants = [each for each in mutants_of(source) if not is_equivalent(name, source, each)]
        if count is not None:
            mutants = Random(f"{seed} {name}").sample(mutants, min(count, len(mutants)))
        killed = 0
        for mutant in mutants:
            if copy.is_killed(name, mutant.code):
                killed += 1
            else:
                print(f"src/penstock/{MODULES[name][0]}:{mutant.line} survived\n{diff_of(source, mutant)}", flush=True)
        print(f"{name}: {killed} of {len(mutants)} killed", flush=True)
        all_killed, all_run = all_killed + killed, all_run + len(mutants)
    print(f"all: {all_killed} of {all_run} killed ({all_killed / all_run:.1%})")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Test the tests: mutate modules and count the mutants that fail them.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)} (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: %(default)s)")
    parser.add_argument("--count", type=int, default=12, help="mutants per module (default: %(default)s)")
    parser.add_argument("--all-of", choices=MODULES, help="run every mutant of this module")
    given = parser.parse_args()
    names = [given.all_of] if given.all_of else given.modules or list(MODULES)
    if unknown := set(names) - set(MODULES):
        parser.error(f"no such module: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder:
        is_green = run_modules(Copy(Path(folder)), names, given.seed, None if given.all_of else given.count)
    sys.exit(not is_green)


if __name__ == "__main__":
    main()
