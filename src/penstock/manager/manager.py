"""The manager: keeps the desired state in the metadata store, assigns blocks to workers, tells gateways what there is.

Every manager follows the store. The one that leads writes to it, and acts: what was asked for is committed, folded when
it comes back from the store like everybody else's, and done when the workers say so.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.message import Message
from pydantic import ValidationError

from penstock.core.blocks import BlockView
from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.core.cluster.leaders import ManagerRecord
from penstock.core.cluster.model_answers import ModelAnswers
from penstock.core.error_text import first_problem
from penstock.core.errors import (
    InternalError,
    InvalidRequest,
    ModelNotReady,
    PenstockError,
    UnknownModel,
)
from penstock.core.settings import Routing
from penstock.manager.deploying.deployment import Choice, Deployment
from penstock.manager.deploying.repository import Repository, record_of
from penstock.manager.desired import BLOCKS, PRESENT, ROUTING, Folded, encode
from penstock.manager.desired_store import DesiredStore
from penstock.manager.events import Events
from penstock.manager.leading.election import SOLE_LEASE_S, Election
from penstock.manager.lives import LifeRules
from penstock.manager.membership import Membership
from penstock.manager.reign import Notice, Reign
from penstock.manager.tasks import Tasks
from penstock.manager.telling.etags import expecting
from penstock.manager.waiters import Waiters
from penstock.storage.metadata.base import Compare, MetadataStore, Write

log = structlog.get_logger()
now = time.monotonic
VERSION = re.compile(r"[0-9]{1,18}")
UNLOAD_S = 30.0
GO_S = 2.0  # what a load waits for those that it replaced: they end what they run, however long that takes
TURN_S = 0.25
RETRY_S = 2.0  # what could not be deployed because the store was away
LOAD_S = 300.0  # what a model gets to load that has no folder here to say it
FindVersion = Callable[[str], Awaitable[Choice]]
OnFolded = Callable[[Folded], None]
OnCounts = Callable[[str, Sequence[AnswerCounts]], None]
OnAnswers = Callable[[str, str, Sequence[ModelAnswers]], None]
OnSessions = Callable[[str, Mapping[str, int]], None]
OnReign = Callable[[Reign], None]
Watched = Callable[[], Iterable[Message]]
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
        self._rules = rules or LifeRules()
        self._is_fresh = is_fresh
        self._is_sole = True
        self._tasks = Tasks("manager", self._failed)
        self._reign_tasks = Tasks("manager", self._failed)
        self._deploying = asyncio.Lock()  # who reads a folder later deploys later
        self._proving = asyncio.Lock()
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the first reign
        self._waiters = Waiters()
        self.wait_until, self.becomes = self._waiters.until, self._waiters.becomes
        self.election = Election(store, me or ManagerRecord(manager_id="manager", address=""), lease_s, self._led)
        self.store = DesiredStore(store, self.election, self._waiters)
        self.desired, self.commit = self.store.state, self.store.commit
        self.reign = Reign(0, self.desired, self._rules, now())
        self.events = Events(self.desired, self.commit, self.store.add)
        self.membership = Membership(self.desired, self.commit)
        self._repository = Repository(repository, self.desired)
        self.find_version: FindVersion | None = None  # of what was uploaded: NAME, NAME:VERSION or NAME@ALIAS
        self.on_folded: list[OnFolded] = []  # told after what was written is folded
        self.on_counts: list[OnCounts] = []  # told what gateways count: the gateway's id and its counts
        self.on_answers: list[OnAnswers] = []  # and what they answered: its id, its incarnation, since that began
        self.on_sessions: list[OnSessions] = []  # and what sessions they have: its id and its counts
        self.on_reign: list[OnReign] = []  # told of each that begins, before anybody hears anything of it
        self.before_load: list[BeforeLoad] = []  # asked before a model is loaded anew; may refuse
        self.watched: dict[str, Watched] = {}  # by kind, what operators may watch
        self.figures: Callable[[], str] = str  # of the cluster at this moment, as JSON
        self.managers_key: Callable[[], str] = str  # what it shows to other managers
        self.is_governed: Callable[[str], bool] = lambda model: False  # its folder says no more which versions serve

    async def start(self, is_sole: bool = True) -> None:
        """Where it `is_sole` it returns when it leads, and refuses a model.yaml with a fault."""
        self._is_sole = is_sole
        await self._repository.check()
        self._tasks.spawn(self._follow_forever())
        await self.store.wait_heard()
        self._tasks.spawn(self.events.write_forever())
        self.election.start()
        if is_sole:
            await self._begun

    async def close(self) -> None:
        await self.election.close()
        await self._reign_tasks.close()
        await self._tasks.close()

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
        if not await self._waiters.becomes(lambda: registry.has_answered(model), timeout_s):
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
        await self._waiters.becomes(lambda: registry.has_gone(model), GO_S)

    async def unload(self, model: str, *further: Notice, compares: Sequence[Compare] = ()) -> None:
        """It stays unloaded, over restarts too, until it is loaded. `compares`: what must be so until it is written."""
        async with self._deploying:
            self.check_leads()
            if not self.desired.of_model(model):
                raise UnknownModel(f"the repository has no model '{model}'")
            told = Notice("model_unloaded", model, "it stays unloaded until it is loaded")
            await self.events.commit(self._deployment().unload(model), [told, *further], compares)
        registry = self.reign.registry
        if not await self._waiters.becomes(lambda: registry.has_gone(model), UNLOAD_S):
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
        if not source and (found := await self._repository.choose(model, version)):
            return found
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

    async def change_block(self, block_id: str, *told: Notice, expected: str = "", **fields: Any) -> None:
        """Without loading it anew. `expected`: a tag of what was read, of which the write must be the last."""
        async with self._deploying:
            block = self.desired.blocks.get(block_id)
            if block is None:
                raise UnknownModel(f"there is no block '{block_id}'")
            with expecting(expected, BLOCKS + block_id, self.desired.revisions) as compares:
                await self.events.commit([self._deployment().change(block, **fields)], told, compares)

    def view(self) -> list[BlockView]:
        return self.reign.boards.blocks()

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
                await self.store.begin_history()

    async def notify(self, is_sure: bool = False) -> None:
        """Wakes those who wait, where something is another."""
        for notice in self.reign.notices:
            self.events.tell(*notice)
        self.reign.notices.clear()
        if self.reign.take_news() or is_sure:
            self._waiters.wake()

    async def _follow_forever(self) -> None:
        async for folded in self.store.follow():
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
        self._reign_tasks.cancel()
        self.reign = Reign(0, self.desired, self._rules, now())
        if epoch:
            self._reign_tasks.spawn(self._begin(epoch))
        self._waiters.wake()

    async def _begin(self, epoch: int) -> None:
        """First everything that was written before this reign is folded, and only then is anything decided."""
        await self.wait_until(lambda: self.desired.revision >= epoch)
        while not self.desired.history:
            try:
                await self.store.begin_history()
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
        ):
            self._reign_tasks.spawn(coroutine)

    async def _deploy_repository(self) -> None:
        while True:
            try:
                async with self._deploying:
                    plan = self._repository.plan(self._deployment(), self.is_governed, may_remove=self._is_sole)
                    for writes in await plan:
                        await self.commit(writes)
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

    def _failed(self, error: BaseException) -> None:
        self._tell_begun(InternalError(f"the manager could not begin: {error!r}"))

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
            folder = await self._repository.find(model)
            if folder is not None:
                await self.commit(self._deployment().deploy_folder(model, record_of(folder)))
                log.info("deployed", model=model, versions=list(folder.versions))
                return folder.settings.timeouts.load_s
            if not self.desired.of_model(model):
                raise UnknownModel(f"the repository has no model '{model}'")
            await self.commit(self._deployment().reload(model))
            return LOAD_S

    def _check_reign(self, registry: object) -> None:
        if self.reign.registry is not registry:
            raise self.election.not_leading()
