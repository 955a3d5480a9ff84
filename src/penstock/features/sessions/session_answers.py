"""Remembers answers for repeats of a session's requests, bounded in number and bytes. Pure: no I/O."""

from collections import OrderedDict
from dataclasses import dataclass

from penstock.core.errors import PenstockError
from penstock.core.requests import InferResponse

OVERHEAD_BYTES = 1024  # assumed size of an answer without its tensors


@dataclass(frozen=True, slots=True)
class StreamedAnswers:
    """The answers of a streaming model to one request."""

    answers: tuple[InferResponse, ...]
    is_complete: bool = True  # False: there were too many answers to remember, so only the last one is included


Answered = InferResponse | StreamedAnswers
Outcome = Answered | PenstockError


@dataclass(frozen=True, slots=True)
class RememberedAnswer:
    """The outcome of a step, remembered for repeats of the step."""

    outcome: Outcome
    position: int  # of the step in the order in which the session's steps ran, from 1
    size_bytes: int


class RememberedAnswers:
    """The remembered answers of all sessions. Keys contain the session's life, so that restarts forget answers."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._answers: OrderedDict[tuple[int, int], RememberedAnswer] = OrderedDict()  # oldest first
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, life: int, seq_no: int) -> RememberedAnswer | None:
        return self._answers.get((life, seq_no))

    def remember(self, life: int, seq_no: int, outcome: Outcome, position: int, max_answers: int) -> None:
        """Remember an answer: at most `most` per session. If all answers together are too large, drop the oldest."""
        self._drop(life, seq_no - max_answers)
        if not max_answers or (isinstance(outcome, StreamedAnswers) and not outcome.is_complete):
            return
        size_bytes = (
            sum([OVERHEAD_BYTES + estimate_answer_bytes(answer) for answer in list_answers(outcome)]) or OVERHEAD_BYTES
        )
        answer = self._answers[life, seq_no] = RememberedAnswer(outcome, position, size_bytes)
        self.size_bytes += answer.size_bytes
        while self.size_bytes > self._max_bytes:
            _, oldest = self._answers.popitem(last=False)
            self.size_bytes -= oldest.size_bytes

    def list_answers(self, life: int, first: int, end: int) -> dict[int, RememberedAnswer]:
        found = {seq_no: self._answers.get((life, seq_no)) for seq_no in range(first, end)}
        return {seq_no: answer for seq_no, answer in found.items() if answer is not None}

    def forget(self, life: int, first: int, end: int) -> None:
        for seq_no in range(first, end):
            self._drop(life, seq_no)

    def _drop(self, life: int, seq_no: int) -> None:
        answer = self._answers.pop((life, seq_no), None)
        if answer is not None:
            self.size_bytes -= answer.size_bytes


def list_answers(outcome: Outcome) -> tuple[InferResponse, ...]:
    if isinstance(outcome, PenstockError):
        return ()
    return outcome.answers if isinstance(outcome, StreamedAnswers) else (outcome,)


def estimate_answer_bytes(answer: InferResponse) -> int:
    return sum([len(tensor.data) for tensor in answer.outputs])
