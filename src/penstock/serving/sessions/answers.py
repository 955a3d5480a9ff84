"""The answers that a session's requests get when they are sent again: bounded in number and in bytes. Decides only."""

from collections import OrderedDict
from dataclasses import dataclass

from penstock.core.errors import PenstockError
from penstock.core.requests import InferResponse

OVERHEAD_BYTES = 1024  # about what an answer takes beside its tensors


@dataclass(frozen=True, slots=True)
class ManyAnswers:
    """What a decoupled model gave to one request."""

    answers: tuple[InferResponse, ...]
    is_whole: bool = True  # False: it was too much to be kept


Answered = InferResponse | ManyAnswers
Outcome = Answered | PenstockError


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    outcome: Outcome
    position: int  # where in its session it ran, from 1
    size_bytes: int


class KeptAnswers:
    """Answers of all sessions, by the number of a session's life: none finds an earlier life's answers."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[int, int], KeptAnswer] = OrderedDict()  # oldest first
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, life: int, seq_no: int) -> KeptAnswer | None:
        return self._kept.get((life, seq_no))

    def keep(self, life: int, seq_no: int, outcome: Outcome, position: int, most: int) -> None:
        """Keeps at most `most` answers of the session; where all together are too large, the oldest go."""
        self._drop(life, seq_no - most)
        if not most or (isinstance(outcome, ManyAnswers) and not outcome.is_whole):
            return
        size_bytes = sum([OVERHEAD_BYTES + answer_bytes(answer) for answer in answers_of(outcome)]) or OVERHEAD_BYTES
        answer = self._kept[life, seq_no] = KeptAnswer(outcome, position, size_bytes)
        self.size_bytes += answer.size_bytes
        while self.size_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.size_bytes -= oldest.size_bytes

    def of(self, life: int, first: int, end: int) -> dict[int, KeptAnswer]:
        found = {seq_no: self._kept.get((life, seq_no)) for seq_no in range(first, end)}
        return {seq_no: answer for seq_no, answer in found.items() if answer is not None}

    def forget(self, life: int, first: int, end: int) -> None:
        for seq_no in range(first, end):
            self._drop(life, seq_no)

    def _drop(self, life: int, seq_no: int) -> None:
        answer = self._kept.pop((life, seq_no), None)
        if answer is not None:
            self.size_bytes -= answer.size_bytes


def answers_of(outcome: Outcome) -> tuple[InferResponse, ...]:
    if isinstance(outcome, PenstockError):
        return ()
    return outcome.answers if isinstance(outcome, ManyAnswers) else (outcome,)


def answer_bytes(answer: InferResponse) -> int:
    return sum([len(tensor.data) for tensor in answer.outputs])
