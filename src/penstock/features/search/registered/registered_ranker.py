"""Runs registered policies in the gateway: each policy in its own process, with a deadline and a memory limit."""

import asyncio
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import structlog

from penstock.core.config import SearchSettings
from penstock.core.errors import ConfigError, EngineFailed, Overloaded, PolicyFailed
from penstock.core.signature import DeclaredTensor
from penstock.features.search.block_catalogue import BlockCatalogue
from penstock.features.search.block_query import BlockQuery
from penstock.features.search.block_ranking import MAX_TOP, RankedBlock, RankingSettings, RankingTurn, rank
from penstock.features.search.documents import BlockDocument
from penstock.features.search.registered.policy_model import CODE_FILE, RANKING, REQUEST
from penstock.features.search.registered.policy_record import POLICIES, PolicyRecord
from penstock.features.search.slices import run_in_slices
from penstock.telemetry.metrics import SearchMetrics

if TYPE_CHECKING:
    from penstock.engines.python.python_engine import PythonEngine

log = structlog.get_logger()
MAX_WAITING = 64  # maximum number of searches that wait for one policy
LOAD_S = 10.0  # to start a process and load the policy
CLOSE_S = 1.0
MODEL_FILE = "from penstock.features.search.registered.policy_model import PolicyModel as Model\n"


class RegisteredRanker:
    """A `Ranker` that runs the registered policies."""

    def __init__(self, catalogue: BlockCatalogue, settings: SearchSettings, metrics: SearchMetrics) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._metrics = metrics
        self._records: dict[str, PolicyRecord] = {}
        self._published: Mapping[str, bytes] = {}
        self._running: OrderedDict[str, _PolicyProcess] = OrderedDict()  # the most recently used process is last

    def names(self) -> Sequence[str]:
        return list(self._records)

    def records_changed(self, records: Mapping[str, bytes]) -> None:
        """Read the policies from the published records of all features."""
        if records is self._published:
            return
        self._published = records
        found = [PolicyRecord.model_validate_json(value) for key, value in records.items() if key.startswith(POLICIES)]
        self._records = {each.name: each for each in found}
        for name, process in list(self._running.items()):
            if self._records.get(name) != process.record:
                del self._running[name]
                process.close()

    async def rank(
        self, query: BlockQuery, documents: Sequence[BlockDocument], turn: RankingTurn, limit: int
    ) -> list[RankedBlock]:
        """Rank at most MAX_TOP blocks, which a hash of the session selects if there are more blocks."""
        record = self._records[query.policy]
        if len(documents) > MAX_TOP:
            instances = self._catalogue.instances
            chosen = await run_in_slices(rank("random:v1", documents, instances, RankingSettings(), turn, MAX_TOP))
            documents = [each.document for each in chosen]
        request = orjson.dumps(
            {"candidates": self._describe_candidates(documents), "context": _describe_context(query, turn)}
        )
        try:
            return _read_ranking(record.name, await self._find_process(record).call(request), documents)[:limit]
        except (EngineFailed, ConfigError, PolicyFailed) as error:
            self._metrics.policy_failures.labels(record.name).inc()
            log.warning("policy_failed", policy=record.name, error=error.message)
            if isinstance(error, PolicyFailed):
                raise
            raise PolicyFailed(f"the policy '{record.name}' failed: {error.message}") from error

    async def close(self) -> None:
        running, self._running = list(self._running.values()), OrderedDict()
        for process in running:
            process.close()
        await asyncio.gather(*[asyncio.to_thread(process.wait_closed) for process in running])

    def _find_process(self, record: PolicyRecord) -> "_PolicyProcess":
        process = self._running.get(record.name)
        if process is None:
            if len(self._running) >= self._settings.max_policy_processes:
                idle = next((name for name, each in self._running.items() if not each.waiting), None)
                if idle is None:
                    raise Overloaded(
                        f"all {len(self._running)} processes of policies are busy (search.max_policy_processes); "
                        "try again later"
                    )
                self._running.pop(idle).close()
            process = self._running[record.name] = _PolicyProcess(record, self._settings)
        self._running.move_to_end(record.name)
        return process

    def _describe_candidates(self, documents: Sequence[BlockDocument]) -> list[dict[str, Any]]:
        return [
            {**each.values, "instances": [dict(instance) for instance in self._catalogue.instances(each)]}
            for each in documents
        ]


class _PolicyProcess:
    """Runs one policy's process, and a thread that waits for the answers of the process."""

    def __init__(self, record: PolicyRecord, settings: SearchSettings) -> None:
        self.record = record
        self.waiting = 0  # number of calls that wait or run
        self._settings = settings
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-policy-"))
        name, _, version = record.name.partition(":")
        self._file = self._folder / name / version / "model.py"
        self._engine: PythonEngine | None = None
        self._is_loaded = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    async def call(self, request: bytes) -> bytes:
        if self.waiting >= MAX_WAITING:
            raise Overloaded(f"{self.waiting} searches wait for the policy '{self.record.name}'; try again later")
        self.waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, partial(self._call_engine, request))
        future.add_done_callback(self._finish_call)
        return await future

    def close(self) -> None:
        """End the process as soon as its current call is over."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def wait_closed(self) -> None:
        self._thread.shutdown(wait=True)

    def _finish_call(self, future: "asyncio.Future[bytes]") -> None:
        self.waiting -= 1
        if not future.cancelled():
            future.exception()  # marks the exception as retrieved if the caller has left

    def _call_engine(self, request: bytes) -> bytes:
        if self._engine is None:
            self._engine = self._make_engine()
        if not self._is_loaded:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(MODEL_FILE)
            (self._file.parent / CODE_FILE).write_text(self.record.code, encoding="utf-8")
            self._engine.load()
            self._is_loaded = True
        (found,) = self._engine.infer(0, {REQUEST: np.array([request], dtype=object)}, [RANKING])
        answer: bytes = found[0]
        return answer

    def _make_engine(self) -> "PythonEngine":
        # Imported here, in the thread, because gateways without registered policies need no engines.
        from penstock.engines.engine_options import PythonOptions
        from penstock.engines.engine_protocols import EngineSpec
        from penstock.engines.python.python_engine import PythonEngine

        options = PythonOptions(
            inputs=(DeclaredTensor(name=REQUEST, datatype="BYTES", shape=(1,)),),
            outputs=(DeclaredTensor(name=RANKING, datatype="BYTES", shape=(1,)),),
            memory_mb=self._settings.policy_memory_mb,
        )
        return PythonEngine(
            EngineSpec(self._file, "auto", 1, 1),
            options,
            hang_s=self._settings.policy_timeout_s,
            load_s=LOAD_S,
            close_s=CLOSE_S,
        )

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _describe_context(query: BlockQuery, turn: RankingTurn) -> dict[str, Any]:
    return {
        "settings": query.settings,
        "parameters": query.parameters,
        "user_query": query.text,
        "session_id": turn.session,
    }


def _read_ranking(policy: str, answer: bytes, documents: Sequence[BlockDocument]) -> list[RankedBlock]:
    """Return the ranking: a list of block ids, or of pairs of a block id and a score, best first."""
    known = {each.block_id: each for each in documents}
    found = orjson.loads(answer)
    if not isinstance(found, list):
        raise PolicyFailed(f"the policy '{policy}' returned {type(found).__name__}: return a list of block ids")
    ranked: list[RankedBlock] = []
    for each in found:
        block_id, score = each if isinstance(each, list) and len(each) == 2 else (each, 0.0)
        document = known.pop(block_id, None) if isinstance(block_id, str) else None
        if document is None or isinstance(score, bool) or not isinstance(score, int | float):
            raise PolicyFailed(
                f"the policy '{policy}' returned {str(each)[:80]}: return ids of the candidates, each once, or pairs "
                "of an id and a score"
            )
        ranked.append(RankedBlock(document, float(score), f"place {len(ranked) + 1} of the policy"))
    return ranked
