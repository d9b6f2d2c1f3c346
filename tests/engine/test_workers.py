"""Worker processes: their order, their errors, their death."""

from __future__ import annotations

import multiprocessing
import os
import signal
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
from dynafed.errors import WorkerDied
from dynafed.tree import Tree


def backend(count: int) -> ProcessBackend:
    return ProcessBackend(Federation.create(tiny(workers=count, participation=1.0), train=TRAIN, test=TEST))


def slow_first(common: Tree, number: int) -> tuple[int, None]:
    time.sleep(0.2 if number == 0 else 0.0)
    return number, None


def broken(common: Tree, number: int) -> tuple[int, None]:
    if number == 3:
        raise ValueError("three")
    return number, None


def deadly(common: Tree, number: int) -> tuple[bytes, None]:
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


def doubled(common: Tree, sent: bytes) -> tuple[bytes, None]:
    return sent + bytes(common["zeros"].numpy()), None


def test_large_messages_in_both_directions_never_wait_for_each_other() -> None:
    megabytes = bytes(3 * 2**20)
    common = {"zeros": torch.zeros(len(megabytes), dtype=torch.uint8)}
    with backend(2) as workers:
        results = workers._in_order(doubled, common, [(megabytes,)] * 9)
        assert all(value == 2 * megabytes for value, _ in results)


def filled(common: Tree, number: int) -> tuple[int, Tree]:
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


def test_workers_with_several_threads(tmp_path: Path) -> None:
    """They can't be forked, so the model and the data must be such that they can be sent."""
    done = dynafed.run(tiny(workers=2, threads=2, rounds=1), train=TRAIN, test=TEST, out=tmp_path / "r")
    assert done.summary["rounds"] == 1


def test_an_error_in_a_worker_is_the_caller_s() -> None:
    with pytest.raises(ValueError, match="three") as caught, backend(2) as workers:
        list(workers._in_order(broken, {}, ((number,) for number in range(9))))
    assert "in broken" in caught.value.__notes__[0]  # the traceback of the worker


def test_a_worker_s_death_is_noticed_even_while_it_sends() -> None:
    with pytest.raises(WorkerDied, match="exit code -9"), backend(2) as workers:
        list(workers._in_order(deadly, {}, ((number,) for number in range(9))))


class Killer(Callback):
    """Kills a worker after some rounds."""

    def on_round_end(self, run: RunContext, record: Record) -> None:
        if record["round"] == 3:
            multiprocessing.active_children()[0].kill()


def test_after_a_worker_s_death_the_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="dynafed resume"):
        dynafed.run(tiny(workers=2), train=TRAIN, test=TEST, out=tmp_path / "r", callbacks=[Killer()])
    again = dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST)
    assert tree.digest(again.state.model) == tree.digest(run_tiny(tmp_path / "whole").state.model)
