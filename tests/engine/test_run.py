"""Whole runs: the same bits for any number of workers and after any resume; faults; files; one's own parts."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import TEST, TRAIN, run_tiny, tiny
from torch import nn

import dynafed
from dynafed import Config, Interrupted, UserError, tree
from dynafed.callbacks import Callback, Record, RunContext
from dynafed.engine import checkpoint
from dynafed.engine.federation import Federation, sample_clients
from dynafed.engine.files import lock_folder, new_folder
from dynafed.engine.processes import ProcessBackend
from dynafed.engine.summary import read_metrics


def bits(result: dynafed.Result) -> str:
    return tree.digest(result.state.model)


def test_the_files_of_a_run(finished: dynafed.Result) -> None:
    names = {entry.name for entry in finished.path.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "summary.json", "checkpoint", "partition.json"}
    records = read_metrics(finished.path)
    assert records == finished.history
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert {"accuracy", "loss", "train_loss", "seconds_local", "seconds_server", "clients", "lr"} <= set(records[0])
    summary = json.loads((finished.path / "summary.json").read_text())
    assert summary["final_accuracy"] == finished.final_accuracy == np.mean([r["accuracy"] for r in records[-5:]])
    assert summary["final_std"] == pytest.approx(np.std([r["accuracy"] for r in records[-5:]]))
    assert {"best", "rounds_to_target", "seconds", "peak_rss_mb", "versions"} <= set(summary)
    shown = json.loads((finished.path / "partition.json").read_text())
    assert np.sum(shown["counts"]) == 400


def test_bytes_are_what_was_sent(finished: dynafed.Result) -> None:
    model = tree.nbytes(finished.state.model)
    assert all(record["bytes_up"] == record["bytes_down"] == 4 * model for record in finished.history)


def test_the_result_s_model_predicts(finished: dynafed.Result) -> None:
    with torch.no_grad():
        right = finished.model(torch.from_numpy(TEST[0])).argmax(1).numpy() == TEST[1]
    assert right.mean() == pytest.approx(finished.history[-1]["accuracy"])


def test_training_learns(tmp_path: Path) -> None:
    result = run_tiny(tmp_path / "r", rounds=15, alpha=100.0, lr=0.02)
    assert result.final_accuracy > 0.85


@pytest.mark.parametrize("client_state", ["fresh", "persistent"])
def test_the_same_bits_for_any_number_of_workers(tmp_path: Path, client_state: str) -> None:
    runs = [run_tiny(tmp_path / str(n), workers=n, client_state=client_state, stragglers=0.3) for n in (1, 2, 4)]
    assert len({bits(one) for one in runs}) == 1
    timeless = [[{k: v for k, v in r.items() if "seconds" not in k} for r in one.history] for one in runs]
    assert timeless[0] == timeless[1] == timeless[2]


def test_another_seed_gives_another_run(tmp_path: Path, finished: dynafed.Result) -> None:
    assert bits(run_tiny(tmp_path / "r", seed=1)) != bits(finished)


class StopAfter(Callback):
    """A progress that asks the run to stop, as Ctrl-C would."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_round_end(self, run: RunContext, record: Record) -> None:
        if record["round"] == self.last:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("stop", [1, 2, 5])
@pytest.mark.parametrize("memory", [0, 1024])
def test_resume_ends_with_the_same_bits(tmp_path: Path, stop: int, memory: int) -> None:
    changes = {"client_state": "persistent", "client_memory_mb": memory, "dropout": 0.2}
    whole = run_tiny(tmp_path / "whole", **changes)
    with pytest.raises(Interrupted, match="dynafed resume"):
        dynafed.run(tiny(**changes), train=TRAIN, test=TEST, out=tmp_path / "cut", callbacks=[StopAfter(stop)])
    assert not (tmp_path / "cut" / "summary.json").exists()
    again = dynafed.resume(tmp_path / "cut", train=TRAIN, test=TEST, changes={"workers": 2})
    assert bits(again) == bits(whole)
    assert [r["accuracy"] for r in again.history] == [r["accuracy"] for r in whole.history]
    assert again.final_accuracy == whole.final_accuracy


def test_a_finished_run_resumes_to_itself_and_can_go_on_longer(tmp_path: Path) -> None:
    short = run_tiny(tmp_path / "r", rounds=3)
    assert bits(dynafed.resume(short.path, train=TRAIN, test=TEST)) == bits(short)
    longer = dynafed.resume(short.path, train=TRAIN, test=TEST, changes={"rounds": 6})
    assert bits(longer) == bits(run_tiny(tmp_path / "whole"))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run_tiny(tmp_path / "r", client_state="persistent")
    (tmp_path / "r" / "summary.json").unlink()
    newest, before = sorted((tmp_path / "r" / "checkpoint").iterdir(), reverse=True)
    blob = bytearray((newest / "state.safetensors").read_bytes())
    blob[len(blob) // 2] ^= 1
    (newest / "state.safetensors").write_bytes(blob)
    assert bits(dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST)) == bits(whole)
    assert "damaged" in caplog.text
    for folder in (newest, before):
        (folder / "state.json").write_text("{")
    assert bits(dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST)) == bits(whole)


def test_a_damaged_client_state_falls_back_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run_tiny(tmp_path / "r", client_state="persistent")
    newest = max((tmp_path / "r" / "clients").glob("*/*-6.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    assert bits(dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST)) == bits(whole)
    assert newest.name in caplog.text


def test_old_checkpoints_and_client_states_are_deleted(tmp_path: Path) -> None:
    run_tiny(tmp_path / "r", rounds=12, client_state="persistent", keep_checkpoints=2)
    assert sorted(folder.name for folder in (tmp_path / "r" / "checkpoint").iterdir()) == [
        "round-000010",
        "round-000012",
    ]
    assert len(list((tmp_path / "r" / "clients").glob("*/*"))) <= 2 * 8


def test_a_run_is_never_overwritten_nor_resumed_on_other_data(tmp_path: Path, finished: dynafed.Result) -> None:
    with pytest.raises(UserError, match="already holds a run"):
        dynafed.run(tiny(), train=TRAIN, test=TEST, out=finished.path)
    with pytest.raises(UserError, match="other data"):
        dynafed.resume(finished.path, train=TEST, test=TRAIN)
    with pytest.raises(UserError, match="holds no run"):
        dynafed.resume(tmp_path)
    with pytest.raises(UserError, match="pass train= and test= again"):
        dynafed.resume(finished.path)


def test_a_run_in_a_thread_needs_no_signals(tmp_path: Path) -> None:
    results: list[dynafed.Result] = []
    thread = threading.Thread(target=lambda: results.append(run_tiny(tmp_path / "r", rounds=1)))
    thread.start()
    thread.join()
    assert results[0].summary["rounds"] == 1


def test_dropout_and_stragglers() -> None:
    federation = Federation.create(
        tiny(clients=40, participation=1.0, dropout=0.3, stragglers=0.5), train=TRAIN, test=TEST
    )
    cohorts = [sample_clients(federation, round_num) for round_num in range(1, 26)]
    dropped = sum(len(cohort.dropped) for cohort in cohorts)
    slow = [work for cohort in cohorts for _, work in cohort.working if work < 1]
    assert 0.25 < dropped / 1000 < 0.35
    assert 0.3 < len(slow) / 1000 < 0.4
    assert 0.4 < np.mean(slow) < 0.6
    strict = Federation.create(tiny(stragglers=1.0, straggler_policy="drop"), train=TRAIN, test=TEST)
    assert not sample_clients(strict, 1).working


def test_a_round_with_too_few_survivors_is_repeated_or_skipped(tmp_path: Path) -> None:
    repeated = run_tiny(tmp_path / "a", dropout=0.6, min_survivors=3, max_repeats=100)
    assert any(record["repeats"] for record in repeated.history)
    assert all(len(record["clients"]) >= 3 for record in repeated.history)
    # What failed attempts cost counts, too.
    model = tree.nbytes(repeated.state.model)
    assert all(record["bytes_down"] == 4 * model * (1 + record["repeats"]) for record in repeated.history)
    assert all(
        record["bytes_up"] == model * (4 + 4 * record["repeats"] - len(record["dropped"]))
        for record in repeated.history
    )
    assert all(record["seconds_clients"] > 0 for record in repeated.history)
    skipped = run_tiny(tmp_path / "b", dropout=1.0, failed_round="skip", rounds=2, max_failed_rounds=0)
    assert all(record["skipped"] for record in skipped.history)
    assert bits(skipped) == tree.digest(skipped.federation.problem.initial_model())


def test_diverging_clients_are_rejected_and_the_run_goes_on(tmp_path: Path) -> None:
    x = TRAIN[0].copy()
    x[:50] = 3e38
    lists = [np.arange(50), *np.array_split(np.arange(50, 400), 7)]
    config = tiny(participation=1.0, rounds=2, client_state="persistent")
    result = dynafed.run(config, train=(x, TRAIN[1]), test=TEST, clients=lists, out=tmp_path / "r")
    assert result.history[0]["rejected"][0]["client"] == 0
    assert "NaN" in result.history[0]["rejected"][0]["reason"]
    assert result.history[0]["clients"] == [1, 2, 3, 4, 5, 6, 7]
    assert 0 not in result.state.clients.rounds
    assert all(torch.isfinite(tensor).all() for tensor in result.state.model.values())


def test_one_s_own_parts(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 3
    result = dynafed.run(
        tiny(rounds=1, batch_size=4),
        model=lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)),
        train=(images, labels),
        test=(images, labels),
        clients=[range(0, 20), list(range(10, 40)), np.arange(40, 60)],
        out=tmp_path / "r",
    )
    assert result.federation.config.clients == 3
    assert isinstance(result.model, nn.Sequential)
    with pytest.raises(UserError, match="pass it again"):
        dynafed.resume(tmp_path / "r", train=(images, labels), test=(images, labels), clients=[range(60)] * 3)
    with pytest.raises(UserError, match="pass clients= again"):
        dynafed.resume(tmp_path / "r", train=(images, labels), test=(images, labels))


class Pair(nn.Linear):
    """A model that gives two things."""

    def __init__(self) -> None:
        super().__init__(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return x, x


class Lazy(nn.Module):
    """Layers that are only made at their first use, and one that is never used."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LazyLinear(width), nn.LazyLinear(4))
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def test_lazy_and_unused_layers_are_reproducible(tmp_path: Path) -> None:
    one, two = (dynafed.run(tiny(rounds=1), train=TRAIN, test=TEST, model=Lazy, out=tmp_path / str(k)) for k in (1, 2))
    assert bits(one) == bits(two)


def test_a_config_built_by_hand_is_checked(tmp_path: Path) -> None:
    for wrong in ({"lr": -1.0}, {"rounds": 0}, {"optimizer": "foo"}, {"participation": 2.0}, {"eval_every": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            dynafed.run(Config(**wrong), train=TRAIN, test=TEST, out=tmp_path / "r")  # type: ignore[arg-type]


def test_only_the_execution_may_change_on_resume(finished: dynafed.Result) -> None:
    for changes in ({"lr": 0.5}, {"method": "scaffold"}, {"rounds": 2}):
        with pytest.raises(UserError, match=next(iter(changes))):
            dynafed.resume(finished.path, train=TRAIN, test=TEST, changes=changes)


def test_two_processes_can_t_write_to_one_run(tmp_path: Path) -> None:
    done = run_tiny(tmp_path / "r", rounds=1)
    with lock_folder(done.path), pytest.raises(UserError, match="another process"), lock_folder(done.path, 0.1):
        pass


def test_retention_keeps_the_newest_sound_checkpoint(tmp_path: Path) -> None:
    whole = run_tiny(tmp_path / "r")
    for folder in (tmp_path / "r" / "checkpoint").iterdir():
        (folder / "state.json").write_text("{")
    with pytest.raises(Interrupted):
        dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST, callbacks=[StopAfter(3)])
    kept = sorted(folder.name for folder in (tmp_path / "r" / "checkpoint").iterdir())
    assert kept == ["round-000002", "round-000003"]
    assert bits(dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST)) == bits(whole)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"train": TRAIN}, "give both"),
        ({"train": TRAIN, "test": TEST, "model": lambda: nn.Linear(5, 4)}, "can't take samples"),
        (
            {"train": TRAIN, "test": TEST, "model": lambda: nn.Linear(6, 9)},
            "9 outputs for a sample, but there are 4 classes",
        ),
        ({"train": TRAIN, "test": TEST, "model": lambda: nn.Linear(6, 4).requires_grad_(False)}, "no trainable"),
        ({"train": TRAIN, "test": TEST, "clients": [[0, 1], [400]]}, "400"),
        ({"train": TRAIN, "test": TEST, "clients": 5}, "list or a dict"),
        ({"train": TRAIN, "test": TEST, "model": nn.Linear(6, 4)}, "a function that makes"),
        ({"train": TRAIN, "test": TEST, "model": "mlp"}, "a function that makes"),
        ({"train": TRAIN, "test": TEST, "model": lambda: Pair()}, "not tuple"),
        ({"train": (TRAIN[0], TRAIN[1] * 10_000_000), "test": TEST}, "number them from 0"),
    ],
)
def test_parts_that_don_t_fit_are_refused_before_round_1(tmp_path: Path, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dynafed.run(tiny(), out=tmp_path / "r", **parts)
    assert not (tmp_path / "r").exists()


def test_devices_that_are_not_here_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not one of cpu"):
        run_tiny(tmp_path / "r", device="tpu")
    missing = "cuda" if not torch.cuda.is_available() else "mps"
    with pytest.raises(UserError, match="finds none"):
        run_tiny(tmp_path / "r", device=missing)


def test_hold_outs_are_carved_before_the_split(tmp_path: Path) -> None:
    federation = Federation.create(
        tiny(server_samples=40, validation_samples=60, evaluate="validation"), train=TRAIN, test=TEST
    )
    held = federation.data
    everything = np.concatenate([held.server_rows, held.validation_rows, held.partition.indices])
    assert sorted(everything) == list(range(400))
    assert len(federation.server_side.data[1]) == 40
    assert federation.evaluation_size() == 60
    result = run_tiny(tmp_path / "r", validation_samples=60, evaluate="validation", rounds=1)
    assert result.summary["evaluated_on"] == "validation"
    with pytest.raises(UserError, match="leaves 0 samples"):
        dynafed.run(tiny(server_samples=5), train=TRAIN, test=TEST, clients=[range(400)], out=tmp_path / "x")
    own = Federation.create(tiny(server_samples=5), train=TRAIN, test=TEST, clients=[range(200)] * 8)
    assert len(own.data.server_rows) == 5
    assert own.data.server_rows.min() >= 200


def test_target_and_rare_evaluation(tmp_path: Path) -> None:
    result = run_tiny(tmp_path / "r", eval_every=4, target_accuracy=0.01)
    assert [record["round"] for record in result.history if "accuracy" in record] == [4, 6]
    assert result.summary["rounds_to_target"] == 4


def test_a_lost_checkpoint_folder_starts_anew(tmp_path: Path) -> None:
    federation = Federation.create(tiny(), train=TRAIN, test=TEST)
    assert checkpoint.load(tmp_path, federation, ProcessBackend(federation)).round == 0


def test_a_hundred_thousand_clients_cost_no_more_than_those_sampled(tmp_path: Path) -> None:
    lists = np.arange(100_000)[:, None] % 390 + np.arange(10)
    config = Config.load(None, {"clients": 100_000, "clients_per_round": 32, "rounds": 2, "mlp.width": 8, "workers": 1})
    result = dynafed.run(config, train=TRAIN, test=TEST, clients=list(lists), out=tmp_path / "r")
    assert result.federation.config.clients == 100_000
    assert len(result.history[0]["clients"]) == 32


def _start(out: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    try:
        results.put(tree.digest(run_tiny(out, rounds=3, seed=os.getpid() % 1000).state.model))
    except UserError as error:
        results.put(error)


def test_of_two_runs_that_start_together_one_gets_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=_start, args=(tmp_path / "r", barrier, results)) for _ in range(2)]
    for process in both:
        process.start()
    ended = [results.get(timeout=120) for _ in both]
    for process in both:
        process.join()
    (lost,) = (each for each in ended if isinstance(each, UserError))
    assert "already holds a run" in str(lost) or "another process" in str(lost)
    (won,) = (each for each in ended if isinstance(each, str))
    assert tree.digest(dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST).state.model) == won


def test_default_folders_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    made = [new_folder("fedavg-hf:x/y") for _ in range(3)]
    assert [path.name for path in made] == ["now-fedavg-hf_x_y", "now-fedavg-hf_x_y-2", "now-fedavg-hf_x_y-3"]
    assert all(path.is_dir() for path in made)


def test_a_result_shows_itself_in_a_line(finished: dynafed.Result) -> None:
    assert repr(finished).startswith("Result(fedavg on custom, 6 rounds: accuracy ")
    assert len(repr(finished)) < 300


def test_a_model_factory_that_fails_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match="the model factory failed: ZeroDivisionError"):
        Federation.create(tiny(), train=TRAIN, test=TEST, model=lambda: 1 // 0)
