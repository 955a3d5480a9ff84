"""The interface through which the manager calls features such as keys, rollouts and the audit log."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.core.cluster.model_answers import ModelAnswers
from penstock.manager.desired_state import StateChanges
from penstock.manager.term import Term


class TrafficReport(NamedTuple):
    """A gateway's report of its requests."""

    gateway_id: str
    incarnation: str
    counts: Sequence[AnswerCounts] = ()  # since the gateway's last report
    answers: Sequence[ModelAnswers] = ()  # since the gateway's process started
    sessions: Mapping[str, int] | None = None


class ManagerFeature:
    """A capability that the manager calls. Subclasses override the methods that they need; the defaults do nothing."""

    def start(self) -> None:
        """Start background tasks. Called on every manager, after the desired state has been read."""

    async def close(self) -> None:
        """Stop background tasks."""

    def state_changed(self, state_changes: StateChanges) -> None:
        """React to changes of the desired state. Called on every manager."""

    def term_started(self, term: Term) -> None:
        """Publish the feature's data through the new term, before any worker or gateway receives updates."""

    def traffic_reported(self, report: TrafficReport) -> None:
        """Process the traffic report of a gateway."""

    async def prepare_load(self, model: str) -> None:
        """Prepare for loading a model again; raise an error to refuse the load."""

    def chooses_versions(self, model: str) -> bool:
        """Return whether the feature, instead of the model's folder, decides which versions are deployed."""
        return False
