"""Worker processes: their order, their errors, their death."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import tree
from dynafed.callbacks import Callback, Record, RunContext
from dynafed.engine.federation import Federation
from dynafed.engine.processes import ProcessBackend
from dynafed.engine.verify import find_changes
from dynafed.engine.worker import _limit_waiting
from dynafed.errors import WorkerDied
from dynafed.tree import Tree


def backend(count: int, **changes: Any) -> ProcessBackend:
    config = tiny(workers=count, participation=1.0, **changes)
    return ProcessBackend(Federation.create(config, train=TRAIN, test=TEST))


def slow_first(federation: Federation, common: Tree, number: int) -> tuple[int, None]:
    time.sleep(0.2 if number == 0 else 0.0)
    return number, None


def broken(federation: Federation, common: Tree, number: int) -> tuple[int, None]:
    if number == 3:
        raise ValueError("three")
    return number, None


def deadly(federation: Federation, common: Tree, number: int) -> tuple[bytes, None]:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return bytes(10_000_000), None


@pytest.mark.parametrize("tasks", [0, 1, 2, 25])
def test_results_come_in_the_tasks_order(tasks: int) -> None:
    with backend(3) as workers:
        for _ in range(2):
            results = workers._in_order(slow_first, {}, ((number,) for number in range(tasks)))
            assert [value for value, _ in results] == list(range(tasks))


def test_no_more_than_a_few_results_wait_for_their_turn() -> None:
    asked = 0

    def tasks() -> Any:
        nonlocal asked
        for number in range(30):
            asked += 1
            yield (number,)

    with backend(2) as workers:
        for taken, _ in enumerate(workers._in_order(slow_first, {}, tasks()), start=1):
            assert asked <= taken + 6


def collected(federation: Federation, common: Tree, number: int) -> tuple[tuple[int, int], None]:
    return (gc.get_freeze_count(), len(gc.get_objects())), None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is shared with the parent")
def test_a_worker_s_collector_leaves_alone_what_it_shares_with_the_parent() -> None:
    """It would write to every object, and so copy all of their memory."""
    ours = len(gc.get_objects())
    with backend(2) as workers:
        for (frozen, left), _ in workers._in_order(collected, {}, ((number,) for number in range(2))):
            assert frozen > 0.9 * ours
            assert left < 0.1 * ours


def doubled(federation: Federation, common: Tree, sent: bytes) -> tuple[bytes, None]:
    return sent + bytes(common["zeros"].numpy()), None


def test_large_messages_in_both_directions_never_wait_for_each_other() -> None:
    megabytes = bytes(3 * 2**20)
    common = {"zeros": torch.zeros(len(megabytes), dtype=torch.uint8)}
    with backend(2) as workers:
        results = workers._in_order(doubled, common, [(megabytes,)] * 9)
        assert all(value == 2 * megabytes for value, _ in results)


def filled(federation: Federation, common: Tree, number: int) -> tuple[int, Tree]:
    time.sleep(0.05 if number % 3 == 0 else 0.0)
    return number, {name: torch.full_like(tensor, number) for name, tensor in common.items()}


def test_models_come_back_whole_though_their_places_are_used_again() -> None:
    with backend(2) as workers:
        layout = workers.federation.problem.initial_model()
        held = list(workers._in_order(filled, layout, ((number,) for number in range(20))))
    for number, (value, model) in enumerate(held):
        assert value == number
        assert model.keys() == layout.keys()
        assert all(torch.equal(tensor, torch.full_like(layout[name], number)) for name, tensor in model.items())


def returned(federation: Federation, common: Tree, number: int, given: Tree) -> tuple[int, Tree]:
    time.sleep(0.05 if number % 3 == 0 else 0.0)
    return number, {name: tensor + common["one"].to(tensor.dtype) for name, tensor in given.items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [0, 3, 100_000], ids=["none", "few", "more than there is room for"])
def test_a_task_s_own_tree_arrives_and_comes_back(size: int, threads: int) -> None:
    def given(number: int) -> Tree:
        whole = torch.arange(size) + number
        return {"b": whole.float().view(1, -1), "a": torch.tensor(number), "c": whole.to(torch.uint8)} if size else {}

    with backend(2, threads=threads) as workers:
        for _ in range(2):
            tasks = ((number, given(number)) for number in range(9))
            held = list(workers._in_order(returned, {"one": torch.ones(1)}, tasks))
            for number, (value, found) in enumerate(held):
                assert value == number
                assert found.keys() == given(number).keys()
                for name, tensor in given(number).items():
                    assert found[name].dtype == tensor.dtype
                    assert torch.equal(found[name].view(tensor.shape), tensor + 1)


def once_deadly(federation: Federation, common: Tree, mark: str, given: Tree) -> tuple[int, Tree]:
    given["a"] += 1  # in shared memory, too
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0, given


def test_a_worker_in_another_s_place_gets_the_same_trees(tmp_path: Path) -> None:
    with backend(2) as workers:
        tasks = ((str(tmp_path / "mark"), {"a": torch.full((5,), number)}) for number in range(9))
        results = [found["a"].tolist() for _, found in workers._in_order(once_deadly, {}, tasks)]
        assert workers.replaced == 1
    assert results == [5 * [number + 1] for number in range(9)]


def test_workers_with_several_threads(tmp_path: Path) -> None:
    """They can't be forked, so the model and the data must be such that they can be sent."""
    done = dynafed.run(tiny(workers=2, threads=2, rounds=1), train=TRAIN, test=TEST, out=tmp_path / "r")
    assert done.summary["rounds"] == 1


def test_an_error_in_a_worker_is_the_caller_s() -> None:
    with pytest.raises(ValueError, match="three") as caught, backend(2) as workers:
        list(workers._in_order(broken, {}, ((number,) for number in range(9))))
    assert "in broken" in caught.value.__notes__[0]  # the traceback of the worker


def test_a_task_that_kills_every_worker_ends_the_run() -> None:
    with pytest.raises(WorkerDied, match=r"died \(exit code -9.*3 have been replaced before"), backend(2) as workers:
        list(workers._in_order(deadly, {}, ((number,) for number in range(9))))


def test_a_stopped_worker_with_a_full_pipe_is_replaced() -> None:
    megabytes = bytes(3 * 2**20)
    common = {"zeros": torch.zeros(len(megabytes), dtype=torch.uint8)}
    with backend(2, worker_timeout=1) as workers:
        os.kill(workers.workers[0].process.pid or 0, signal.SIGSTOP)
        results = workers._in_order(doubled, common, [(megabytes,)] * 5)
        assert all(value == 2 * megabytes for value, _ in results)
        assert workers.replaced


@pytest.mark.skipif(sys.platform == "win32", reason="pipes there aren't sockets")
def test_an_answer_that_never_ends_is_not_waited_for() -> None:
    ours, theirs = multiprocessing.Pipe()
    _limit_waiting(ours, 1)
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"begun")
    with pytest.raises(BlockingIOError):
        ours.recv()


class Signals(Callback):
    """Sends a signal to `count` workers at the end of each of these rounds."""

    def __init__(self, number: int, count: int, rounds: range) -> None:
        self.number, self.count, self.rounds = number, count, rounds

    def on_round_end(self, run: RunContext, record: Record) -> None:
        if record["round"] in self.rounds:
            for worker in multiprocessing.active_children()[: self.count]:
                os.kill(worker.pid or 0, self.number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_is_replaced(tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny(workers=2, worker_timeout=3, client_state="persistent")
    watchers = [Signals(number, 1, range(2, 3))]
    done = dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / "r", callbacks=watchers)
    whole = run_tiny(tmp_path / "whole", client_state="persistent")
    assert tree.digest(done.state.model) == tree.digest(whole.state.model)
    assert "another one does its tasks" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_that_die_or_hang_again_and_again_end_the_run(tmp_path: Path, number: int) -> None:
    config, watchers = tiny(workers=2, worker_timeout=1), [Signals(number, 2, range(3, 7))]
    with pytest.raises(WorkerDied, match="3 have been replaced before; continue with: dynafed resume"):
        dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / "r", callbacks=watchers)
    assert any((tmp_path / "r" / "checkpoint").iterdir())
    assert not find_changes(tmp_path / "r")
    again = dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST, changes={"worker_timeout": 600})
    assert tree.digest(again.state.model) == tree.digest(run_tiny(tmp_path / "whole").state.model)
