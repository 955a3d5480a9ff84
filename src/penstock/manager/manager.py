"""The manager: keeps the desired state in the metadata store, assigns blocks to workers, tells gateways what there is.

Every manager follows the store. The one that leads writes to it, and acts: what was asked for is committed, folded when
it comes back from the store like everybody else's, and done when the workers say so.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from penstock.core.answer_counts import AnswerCounts
from penstock.core.blocks import BlockView
from penstock.core.cluster.leaders import ManagerRecord
from penstock.core.cluster.model_answers import ModelAnswers
from penstock.core.error_text import first_problem
from penstock.core.errors import (
    ConfigError,
    Conflict,
    InternalError,
    InvalidRequest,
    ModelNotReady,
    PenstockError,
    StoreUnavailable,
    UnknownModel,
)
from penstock.core.settings import Routing
from penstock.manager.deployment import Choice, Deployment
from penstock.manager.desired import BLOCKS, HISTORY, PRESENT, ROUTING, DesiredState, Folded, FolderRecord, encode
from penstock.manager.election import SOLE_LEASE_S, Election
from penstock.manager.events import Events
from penstock.manager.lives import LifeRules
from penstock.manager.membership import Membership
from penstock.manager.reign import Notice, Reign
from penstock.models.folder import NAME, ModelFolder, list_model_folders, read_model_folder, read_version
from penstock.storage.metadata.base import MAX_WRITES, Compare, MetadataStore, Snapshot, Write
from penstock.storage.metadata.following import follow

log = structlog.get_logger()
now = time.monotonic
VERSION = re.compile(r"[0-9]{1,18}")
UNLOAD_S = 30.0
GO_S = 2.0  # what a load waits for those that it replaced: they end what they run, however long that takes
MAX_SPARES = 3  # older versions that are tried where the latest does not load, and none serves
TURN_S = 0.25
RETRY_S = 2.0  # what could not be deployed because the store was away
APPLY_S = 10.0  # what the store gets to tell of what it took
LOAD_S = 300.0  # what a model gets to load that has no folder here to say it
FindVersion = Callable[[str], Awaitable[Choice]]
OnFolded = Callable[[Folded], None]
OnCounts = Callable[[str, Sequence[AnswerCounts]], None]
OnAnswers = Callable[[str, str, Sequence[ModelAnswers]], None]
OnReign = Callable[[Reign], None]
PlanAudit = Callable[[Sequence[Write]], Awaitable[Sequence[Write]]]
BeforeLoad = Callable[[str], Awaitable[None]]


class Manager:
    """Used from one event loop; workers and gateways reach it through its service."""

    def __init__(
        self,
        store: MetadataStore,
        repository: Path | None = None,
        me: ManagerRecord | None = None,
        lease_s: float = SOLE_LEASE_S,
        rules: LifeRules | None = None,
        is_fresh: bool = False,
    ) -> None:
        """`is_fresh`: no worker or gateway lives that an earlier manager told anything."""
        self._store = store
        self._repository = repository
        self._rules = rules or LifeRules()
        self._is_fresh = is_fresh
        self._is_sole = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._reign_tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._deploying = asyncio.Lock()  # who reads a folder later deploys later
        self._proving = asyncio.Lock()
        self._has_heard = False
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the first reign
        self.desired = DesiredState()
        self.reign = Reign(0, self.desired, self._rules, now())
        self.election = Election(store, me or ManagerRecord(manager_id="manager", address=""), lease_s, self._led)
        self.events = Events(self.desired, self.commit)
        self.membership = Membership(self.desired, self.commit)
        self.find_version: FindVersion | None = None  # of what was uploaded: NAME, NAME:VERSION or NAME@ALIAS
        self.on_folded: list[OnFolded] = []  # told after what was written is folded
        self.on_counts: list[OnCounts] = []  # told what gateways count: the gateway's id and its counts
        self.on_answers: list[OnAnswers] = []  # and what they answered: its id, its incarnation, since that began
        self.on_reign: list[OnReign] = []  # told of each that begins, before anybody hears anything of it
        self.before_load: list[BeforeLoad] = []  # asked before a model is loaded anew; may refuse
        self.audit: PlanAudit = _unaudited  # what is written beside a change, of who asked for it
        self.managers_key: Callable[[], str] = str  # what it shows to other managers
        self.is_governed: Callable[[str], bool] = lambda model: False  # its folder says no more which versions serve

    async def start(self, is_sole: bool = True) -> None:
        """Where it `is_sole` it returns when it leads, and refuses a model.yaml with a fault."""
        self._is_sole = is_sole
        if self._repository is not None:
            await self._read_folders(self._repository, is_strict=True)
        self._spawn(self._follow_forever())
        await self._becomes(lambda: self._has_heard, APPLY_S)
        self.election.start()
        if is_sole:
            await self._begun

    async def close(self) -> None:
        await self.election.close()
        tasks = [*self._tasks, *self._reign_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what is asked of it

    async def load(self, model: str) -> None:
        """Deploys the model anew from its folder; returns when every worker has it, or raises why not.

        What served before serves until then, and on where it fails.
        """
        load_s = await self._deploy(model)
        try:
            await self.wait_loaded(model, load_s)
        except ModelNotReady as error:
            self.events.tell("model_not_loaded", model, error.message)
            raise
        self.events.tell("model_loaded", model, "it was loaded anew")

    async def wait_loaded(self, model: str, timeout_s: float) -> None:
        """Returns when those workers have it that should, and raises where one cannot load it."""
        registry = self.reign.registry
        if not await self._becomes(lambda: registry.has_answered(model), timeout_s):
            self._check_reign(registry)
            wanted = [block for block in registry.of_model(model) if block.is_wanted]
            why = "".join(
                f"; no worker can take version {block.version}: see 'penstock block explain {block.block_id}'"
                for block in wanted
                if registry.workers() and not registry.targets(block)
            )
            versions = ", ".join(block.version for block in wanted)
            raise ModelNotReady(f"model '{model}' version {versions} is not on every worker after {timeout_s} s{why}")
        if failure := registry.failure(model):
            raise ModelNotReady(f"model '{model}' {failure}")
        await self._becomes(lambda: registry.is_settled(model), GO_S)

    async def unload(self, model: str, *further: Notice) -> None:
        """It stays unloaded, over restarts too, until it is loaded."""
        async with self._deploying:
            self.check_leads()
            if not self.desired.of_model(model):
                raise UnknownModel(f"the repository has no model '{model}'")
            told = Notice("model_unloaded", model, "it stays unloaded until it is loaded")
            await self.events.commit(self._deployment().unload(model), [told, *further])
        registry = self.reign.registry
        if not await self._becomes(lambda: registry.is_settled(model), UNLOAD_S):
            self._check_reign(registry)
            raise ModelNotReady(f"model '{model}' takes no more requests, but some worker runs it after {UNLOAD_S} s")

    async def set_routing(self, model: str, routing_json: str) -> None:
        self.check_leads()
        if not self.desired.of_model(model):
            raise UnknownModel(f"the repository has no model '{model}'")
        if routing_json:
            try:
                routing_json = Routing.model_validate_json(routing_json).model_dump_json()
            except ValidationError as error:
                raise InvalidRequest(f"{first_problem(error, 'routing')}; see docs/routing.md") from error
        await self.commit([Write(ROUTING + model, routing_json.encode() or None)])
        log.info("routing", model=model, routing=routing_json or "as model.yaml says")

    async def choose(self, model: str, version: str = "", source: str = "") -> Choice:
        """What is meant by a model's name: its folder, where the repository has one, or else what was uploaded."""
        if version and not VERSION.fullmatch(version):
            raise UnknownModel(f"model '{model}' has no version '{version[:32]}': versions are numbers")
        folder = None if source else await self._find_folder(model)
        if folder is not None:
            path = str(await asyncio.to_thread(folder.path.resolve))
            if not version:
                return Choice(model, path, folder.versions, folder.older[:MAX_SPARES])
            await asyncio.to_thread(read_version, folder.path, version)
            return Choice(model, path, [version])
        if self.find_version is None:
            raise UnknownModel(f"the repository has no model '{model}'")
        return await self.find_version(f"{model}:{version}" if version else model)

    async def deploy(
        self, choice: Choice, beside: Callable[[list[str]], Sequence[Write]] = lambda block_ids: ()
    ) -> list[str]:
        """Writes down that these versions are wanted; returns their blocks. `beside` is what is written with them."""
        async with self._deploying:
            writes = self._deployment().deploy(choice)
            block_ids = [write.key.removeprefix(BLOCKS) for write in writes[: len(choice.versions)]]
            said = f"model '{choice.model}' from {choice.source}"
            told = [Notice("block_deployed", block_id, said) for block_id in block_ids]
            await self.events.commit([*writes, *beside(block_ids)], told, choice.compares)
        found = [self.desired.block(choice.model, version) for version in choice.versions]
        return [block.block_id for block in found if block is not None]

    async def change_block(self, block_id: str, *told: Notice, **fields: Any) -> None:
        """Without loading it anew."""
        async with self._deploying:
            block = self.desired.blocks.get(block_id)
            if block is None:
                raise UnknownModel(f"there is no block '{block_id}'")
            await self.events.commit([self._deployment().change(block, **fields)], told)

    def view(self) -> list[BlockView]:
        return self.reign.boards.blocks()

    async def commit(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int:
        """Writes as long as this manager leads, and returns when it has folded it itself."""
        if not writes:
            return self.desired.revision
        revision = 0
        writes = [*writes, *await self.audit(writes)]
        for first in range(0, len(writes), MAX_WRITES):
            try:
                part = writes[first : first + MAX_WRITES]
                revision = await self._store.commit(part, [self.election.guard, *compares])
            except Conflict as error:
                if compares and self.epoch:
                    raise
                raise self.election.not_leading() from error  # another does
        if not await self._becomes(lambda: self.desired.revision >= revision, APPLY_S):
            raise StoreUnavailable(
                "it was written, but the metadata store does not tell of it; ask again how it stands"
            )
        return revision

    # --- for the service

    @property
    def epoch(self) -> int:
        """Of the reign that acts; 0: this manager does not lead, by the clock of this moment."""
        return self.reign.epoch if self.reign.epoch == self.election.epoch else 0

    def check_leads(self) -> None:
        if not self.epoch:
            raise self.election.not_leading()

    async def prove_reign(self, history: str, epoch: int) -> None:
        """Somebody has heard of that epoch. Where it is later than this manager's, either another leads since, or the
        store was set back to an older copy: who can still write leads, and leads another history from here on."""
        async with self._proving:
            if self.epoch and history == self.desired.history and epoch > self.epoch:
                log.warning("store_set_back", heard=epoch, epoch=self.epoch)
                await self._begin_history()

    async def _begin_history(self) -> None:
        await self.commit([Write(HISTORY, secrets.token_hex(8).encode(), may_wait=True)])

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_so)

    async def notify(self, is_sure: bool = False) -> None:
        """Wakes those who wait, where something is another."""
        for notice in self.reign.notices:
            self.events.tell(*notice)
        self.reign.notices.clear()
        if not self.reign.take_news() and not is_sure:
            return
        async with self._changed:
            self._changed.notify_all()

    # --- following the store

    async def _follow_forever(self) -> None:
        async for heard in follow(self._store, ""):
            folded = self.desired.restart(heard) if isinstance(heard, Snapshot) else self.desired.fold(heard)
            for key, reason in folded.unread:
                log.warning("record_passed_over", key=key, reason=reason)
            self._has_heard = True
            self.reign.fold(folded)
            for listener in self.on_folded:
                listener(folded)
            await self.notify(is_sure=True)

    # --- leading

    def _led(self) -> None:
        """A reign began or ended, of this manager or another."""
        epoch = self.election.epoch
        if epoch == self.reign.epoch:
            return
        for task in self._reign_tasks:
            task.cancel()
        self.reign = Reign(0, self.desired, self._rules, now())
        self._reign_tasks = []
        if epoch:
            self._during_reign(self._begin(epoch))
        self._spawn(self.notify(is_sure=True))

    async def _begin(self, epoch: int) -> None:
        """First everything that was written before this reign is folded, and only then is anything decided."""
        await self.wait_until(lambda: self.desired.revision >= epoch)
        while not self.desired.history:
            try:
                await self._begin_history()
            except PenstockError as error:
                log.warning("history_not_written", error=error.message)
                await asyncio.sleep(RETRY_S)
        reign = Reign(epoch, self.desired, self._rules, now(), self._is_fresh)
        for listener in self.on_reign:
            listener(reign)
        self.reign = reign
        self.membership.begin(is_fresh=self._is_fresh)
        self._is_fresh = False
        await self.membership.turn(now())
        await self.notify(is_sure=True)
        self.events.tell("leader", self.election.manager_id, f"it leads, in epoch {epoch}")
        for coroutine in (
            self._turn_forever(),
            self._deploy_repository(),
            self._write_members_forever(),
            self.events.write_forever(),
        ):
            self._during_reign(coroutine)

    async def _deploy_repository(self) -> None:
        while True:
            try:
                if self._repository is not None:
                    await self._deploy_folders(self._repository)
            except PenstockError as error:
                log.error("repository_not_deployed", error=error.message)
                self._tell_begun(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._tell_begun(None)
                return

    async def _turn_forever(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self.reign.turn(now())
            await self.notify()

    async def _write_members_forever(self) -> None:
        """Apart from the turns: while the store is slow, workers are looked after."""
        while True:
            await asyncio.sleep(TURN_S)
            await self.membership.turn(now())
            present = self.reign.present()
            if self.reign.is_adopting or present == self.desired.present:
                continue
            try:  # a successor need not wait for others than those
                await self.commit([Write(PRESENT, encode(present), may_wait=True)])
            except PenstockError as error:
                log.warning("present_workers_not_written", error=error.message)
                await asyncio.sleep(RETRY_S)

    def _tell_begun(self, error: PenstockError | None) -> None:
        if self._begun.done():
            return
        if error is None:
            self._begun.set_result(None)
        else:
            self._begun.set_exception(error)
            self._begun.exception()  # nobody may wait for it

    # --- deploying

    def _deployment(self) -> Deployment:
        return Deployment(self.desired, self.reign.registry, lambda: f"blk-{secrets.token_hex(6)}")

    async def _deploy(self, model: str) -> float:
        """Returns what its workers get to load it."""
        async with self._deploying:
            self.check_leads()
            for ask in self.before_load:
                await ask(model)
            folder = await self._find_folder(model)
            if folder is not None:
                await self.commit(self._deployment().deploy_folder(model, _record(folder)))
                log.info("deployed", model=model, versions=list(folder.versions))
                return folder.settings.timeouts.load_s
            if not NAME.match(model) or not self.desired.of_model(model):
                raise UnknownModel(f"the repository has no model '{model}'")
            await self.commit(self._deployment().reload(model))
            return LOAD_S

    async def _find_folder(self, model: str) -> ModelFolder | None:
        if self._repository is None or not NAME.match(model):
            return None
        folder = self._repository / model
        if not (folder / "model.yaml").is_file():
            return None
        return await asyncio.to_thread(read_model_folder, folder)

    async def _deploy_folders(self, repository: Path) -> None:
        """Deploys what of the repository is not deployed as it is there; what somebody unloaded stays unloaded."""
        async with self._deploying:
            folders = await self._read_folders(repository, is_strict=False)
            deployment = self._deployment()
            changes = [await self._plan_removal(repository, deployment)]
            for folder in folders:
                if self.is_governed(folder.name):
                    log.info("governed_by_rollout", model=folder.name)
                elif not deployment.is_deployed(folder.name, _record(folder)):
                    changes.append(deployment.deploy_folder(folder.name, _record(folder)))
                    log.info("deployed", model=folder.name, versions=list(folder.versions))
                elif self.desired.is_unloaded(folder.name):
                    log.info("stays_unloaded", model=folder.name)
            for writes in _joined(changes):
                await self.commit(writes)

    async def _plan_removal(self, repository: Path, deployment: Deployment) -> list[Write]:
        """Models whose folders are gone; of several managers, another may have them where this one has not."""
        if not self._is_sole:
            return []
        present = {path.name for path in await asyncio.to_thread(list_model_folders, repository)}
        return deployment.remove_folders(str(await asyncio.to_thread(repository.resolve)), present)

    async def _read_folders(self, repository: Path, is_strict: bool) -> list[ModelFolder]:
        found = []
        for path in await asyncio.to_thread(list_model_folders, repository):
            try:
                found.append(await asyncio.to_thread(read_model_folder, path))
            except ConfigError as error:
                if is_strict:
                    raise
                log.error("not_deployed", model=path.name, error=error.message)
        return found

    # --- waiting

    def _check_reign(self, registry: object) -> None:
        if self.reign.registry is not registry:
            raise self.election.not_leading()

    async def _becomes(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until it is so, and returns whether it became so in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_until(is_so)
        except TimeoutError:
            return False
        return True

    def _during_reign(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._reign_tasks.append(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("manager_task_failed", error=repr(error))
            self._tell_begun(InternalError(f"the manager could not begin: {error!r}"))

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._done)


async def _unaudited(writes: Sequence[Write]) -> Sequence[Write]:
    return ()


def _record(folder: ModelFolder) -> FolderRecord:
    return FolderRecord(source=str(folder.path.resolve()), versions=folder.versions, older=folder.older[:MAX_SPARES])


def _joined(changes: Iterable[list[Write]]) -> list[list[Write]]:
    """As few commits as hold them, none of them parted: a model is deployed all or none."""
    joined: list[list[Write]] = [[]]
    for change in changes:
        if joined[-1] and len(joined[-1]) + len(change) > MAX_WRITES:
            joined.append([])
        joined[-1] += change
    return joined
