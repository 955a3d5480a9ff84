"""The manager: follows the desired state in the metadata store, and assigns blocks to workers while it leads.

Every manager follows the store, and the leader writes to the store. A change is committed to the store, then reaches
every manager (the leader, too) from the store, and is complete when the workers report the change.
"""

import asyncio
from collections.abc import Sequence

import structlog

from penstock.core.errors import InternalError, PenstockError
from penstock.manager.control_plane import ControlPlane, now
from penstock.manager.deploying.deployer import Deployer
from penstock.manager.desired_state import PRESENT, encode
from penstock.manager.feature import ManagerFeature, TrafficReport
from penstock.storage.metadata.metadata_store import Write
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
TICK_S = 0.25
WATCH_S = 1.0  # between two scans of a watched repository
RETRY_S = 2.0  # after the store was unavailable


class Manager:
    """Runs a manager on one event loop; workers and gateways call the manager through ManagerService."""

    def __init__(
        self,
        control: ControlPlane,
        deployer: Deployer,
        features: Sequence[ManagerFeature] = (),
        is_fresh: bool = False,
    ) -> None:
        """`is_fresh`: no worker or gateway holds state from an earlier manager."""
        self.control = control
        self.deployer = deployer
        self._features = features
        self._is_fresh = is_fresh
        self._is_sole = True
        self._is_repository_deployed = False  # in this term
        self._tasks = BackgroundTasks("manager", self._fail_start)
        self._term_tasks = BackgroundTasks("manager", self._fail_start)
        self._first_term: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, is_sole: bool = True) -> None:
        """Follow the store; raise if no model can be read. If `is_sole`, wait until this manager leads."""
        self._is_sole = is_sole
        await self.deployer.check_repository()
        self._tasks.supervise("manager-store", self._follow, deadline_s=None)
        await self.control.store.wait_synced()
        self._tasks.supervise("manager-events", self.control.events.write_batch, deadline_s=None)
        self.control.election.start(self._on_leader_change)
        if is_sole:
            await self._first_term
        for feature in self._features:
            feature.start()

    async def close(self) -> None:
        for feature in self._features:
            await feature.close()
        await self.control.election.close()
        await self._term_tasks.close()
        await self._tasks.close()

    async def load(self, model: str) -> None:
        """Deploy the model again from its folder, and return when every worker has loaded it."""
        self.control.check_leads()
        for feature in self._features:
            await feature.prepare_load(model)
        await self.deployer.load(model)

    def report_traffic(self, report: TrafficReport) -> None:
        for feature in self._features:
            feature.traffic_reported(report)

    async def _follow(self) -> None:
        async for state_changes in self.control.store.follow():
            self.control.term.apply_changes(state_changes)
            for feature in self._features:
                feature.state_changed(state_changes)
            await self.control.notify(is_changed=True)

    # --- leading

    def _on_leader_change(self) -> None:
        """Start or end this manager's term if the election's epoch changed."""
        control, epoch = self.control, self.control.election.epoch
        if epoch == control.term.epoch:
            return
        self._term_tasks.cancel()
        control.set_term(control.create_term(0))
        if epoch:
            self._term_tasks.spawn(self._start_term(epoch))

    async def _start_term(self, epoch: int) -> None:
        """Start a term, after applying all changes that were written before the term."""
        control = self.control
        await control.wait_until(lambda: control.desired.revision >= epoch)
        while not control.desired.history:
            try:
                await control.store.start_history()
            except PenstockError as error:
                log.warning("writing_history_failed", error=error.message)
                await asyncio.sleep(RETRY_S)
        term = control.create_term(epoch, self._is_fresh)
        for feature in self._features:
            feature.term_started(term)
        control.set_term(term)
        control.membership.start_term(is_fresh=self._is_fresh)
        self._is_fresh = False
        await control.membership.tick(now())
        await control.notify(is_changed=True)
        control.events.emit("leader", control.election.manager_id, f"manager became leader (term {epoch})")
        self._term_tasks.supervise("manager-turn", self._tick, every=TICK_S)
        self._term_tasks.supervise("manager-members", self._write_members, every=TICK_S)
        self._term_tasks.spawn(self._deploy_repository())
        if self.deployer.is_watching:
            self._term_tasks.supervise("manager-folders", self._deploy_changes, every=WATCH_S)

    async def _deploy_repository(self) -> None:
        self._is_repository_deployed = False
        while True:
            try:
                await self.deployer.deploy_repository(self._is_governed, may_remove=self._is_sole)
            except PenstockError as error:
                log.error("deploying_repository_failed", error=error.message)
                self._complete_start(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._is_repository_deployed = True
                self._complete_start(None)
                return

    async def _deploy_changes(self) -> None:
        """Deploy changed folders of the repository, once the repository itself is deployed."""
        if self._is_repository_deployed:
            await self.deployer.deploy_changes(self._is_governed, may_remove=self._is_sole, now=now())

    def _is_governed(self, model: str) -> bool:
        return any(feature.chooses_versions(model) for feature in self._features)

    async def _tick(self) -> None:
        self.control.term.tick(now())
        await self.control.notify()

    async def _write_members(self) -> None:
        """Write which workers are present. Runs in its own loop, because the ticks must not wait for a slow store."""
        await self.control.membership.tick(now())
        term = self.control.term
        present = term.list_present_workers()
        if term.is_adopting or present == self.control.desired.present:
            return
        try:  # the next leader waits only for the workers that are written here
            await self.control.commit([Write(PRESENT, encode(present), may_wait=True)])
        except PenstockError as error:
            log.warning("writing_present_workers_failed", error=error.message)
            await asyncio.sleep(RETRY_S)

    def _fail_start(self, error: BaseException) -> None:
        self._complete_start(InternalError(f"the manager could not start: {error!r}"))

    def _complete_start(self, error: PenstockError | None) -> None:
        """Make `start` return, or raise the error if one is given."""
        if self._first_term.done():
            return
        if error is None:
            self._first_term.set_result(None)
        else:
            self._first_term.set_exception(error)
            self._first_term.exception()  # mark the error as retrieved, because `start` may not be waiting
