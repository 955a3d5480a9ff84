"""The core that a busy instance keeps to."""

from penstock.worker.running.cores import SUSPENDED_FOR, Cores

TWO = {0: {0}, 1: {1}}


def test_each_instance_has_its_own_core_while_there_are_enough() -> None:
    cores = Cores(TWO)
    assert [cores.acquire() for _ in range(3)] == [0, 1, None]
    cores.release(1)
    assert [cores.acquire() for _ in range(2)] == [1, None]


def test_an_instance_that_was_busy_last_gets_its_former_core() -> None:
    cores = Cores({number: {number} for number in range(4)})
    taken = [cores.acquire() for _ in range(4)]
    assert taken == [0, 1, 2, 3]
    for number in (2, 0, 3, 1):
        cores.release(number)
    assert [cores.acquire() for _ in range(4)] == [1, 3, 0, 2]


def test_a_single_core_is_not_assigned() -> None:
    assert Cores({5: {5}}).acquire() is None


def test_whole_cores_are_assigned_before_hyperthreads() -> None:
    cores = Cores({0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}})
    assert [cores.acquire() for _ in range(5)] == [0, 2, 1, 3, None]
    for number in (1, 3, 0):
        cores.release(number)
    assert [cores.acquire() for _ in range(2)] == [0, 3]


def test_cores_are_left_to_the_system_for_a_while_if_other_processes_compute() -> None:
    cores = Cores(TWO)
    for _ in range(200):
        cores.record(1000, 850)
    assert cores.acquire() == 0
    noted = 0
    while cores.acquire() is not None:
        cores.release(1)
        cores.record(1000, 500)
        noted += 1
    assert 4 < noted < 40, "only many slow batches are a reason"
    assert [cores.acquire() for _ in range(SUSPENDED_FOR - 1)] == [None] * (SUSPENDED_FOR - 1)
    assert cores.acquire() == 1
