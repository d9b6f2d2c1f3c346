"""Algorithm 2: what happens in which round, resumed or not, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import TEST, TRAIN, run_tiny, tiny
from torch import nn

import dynafed
import dynafed.report
from dynafed import Interrupted, UserError, tree
from dynafed.callbacks import Callback, RunContext
from dynafed.synthesis import SyntheticData

SMALL: dict[str, Any] = {
    "method": "dynafed",
    "rounds": 8,
    "dynafed__trajectory": 4,
    "dynafed__segment": 2,
    "dynafed__samples": 12,
    "dynafed__iterations": 10,
    "dynafed__inner_steps": 3,
    "dynafed__inner_lr": 0.1,
    "dynafed__finetune_steps": 5,
    "dynafed__finetune_lr": 1e-3,
}


def bits(result: dynafed.Result) -> str:
    return tree.digest(result.state.model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dynafed.Result:
    return run_tiny(tmp_path_factory.mktemp("dynafed") / "run", **SMALL)


def test_the_first_rounds_are_fedavg_s_and_the_later_ones_are_refined(whole: dynafed.Result, tmp_path: Path) -> None:
    plain = run_tiny(tmp_path / "r", rounds=8)
    for record, other in zip(whole.history[:4], plain.history[:4], strict=True):
        assert record["accuracy"] == other["accuracy"]
        assert "accuracy_before_refine" not in record
    assert all("accuracy_before_refine" in record for record in whole.history[4:])
    assert whole.history[3]["inner_lr"] > 0
    assert bits(whole) != bits(plain)


def test_no_fine_tuning_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    none = run_tiny(tmp_path / "a", **SMALL | {"dynafed__finetune_steps": 0})
    assert bits(none) == bits(run_tiny(tmp_path / "b", rounds=8))


def test_it_composes_with_a_client_method_and_workers_change_nothing(whole: dynafed.Result, tmp_path: Path) -> None:
    assert bits(run_tiny(tmp_path / "a", **SMALL | {"workers": 2})) == bits(whole)
    both = run_tiny(tmp_path / "b", **SMALL | {"method": "fedprox+dynafed"})
    assert bits(both) != bits(whole)
    assert "accuracy_before_refine" in both.history[-1]


class StopIn(Callback):
    """Asks to stop in the middle of the synthesis."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_progress(self, run: RunContext, stage: str, done: int, total: int) -> None:
        if done == self.iteration:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("iteration", [1, 6])
def test_stopped_in_the_synthesis_it_goes_on_to_the_same_bits(
    whole: dynafed.Result, tmp_path: Path, iteration: int
) -> None:
    changes = SMALL | {"dynafed__evidence": True}
    with pytest.raises(Interrupted):
        dynafed.run(tiny(**changes), train=TRAIN, test=TEST, out=tmp_path / "r", callbacks=[StopIn(iteration)])
    assert (tmp_path / "r" / "synthesis.safetensors").exists()
    again = dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST)
    assert bits(again) == bits(whole)
    losses = [json.loads(line) for line in (tmp_path / "r" / "synthesis.jsonl").read_text().splitlines()]
    assert [int(number) for line in losses for number in line] == list(range(11))


def test_a_synthetic_set_serves_a_later_run(whole: dynafed.Result, tmp_path: Path) -> None:
    file = whole.path / "synthetic.safetensors"
    made = SyntheticData.load(file, (6,), 4)
    assert len(made.x) == 12
    assert made.provenance["config"]["iterations"] == 10
    again = run_tiny(tmp_path / "r", **SMALL | {"dynafed__synthetic": str(file)})
    assert bits(again) == bits(whole)
    assert not (tmp_path / "r" / "synthesis.jsonl").exists()
    with pytest.raises(UserError, match="no synthetic set"):
        run_tiny(tmp_path / "x", **SMALL | {"dynafed__synthetic": "absent.safetensors"})


def test_rates_per_tensor_and_what_has_no_effect_are_in_the_metrics(tmp_path: Path) -> None:
    result = run_tiny(tmp_path / "r", **SMALL | {"dynafed__inner_rates": "tensor"})
    record = result.history[3]
    assert 0 < record["inner_lr_min"] < record["inner_lr"] < record["inner_lr_max"]
    assert 0 < record["invariant_share"] < 1
    assert record["invariant_share_unused"] == 0
    blocks = json.loads((tmp_path / "r" / "report.json").read_text())
    (table,) = (block["data"]["rows"] for block in blocks if block["kind"] == "table")
    assert [row[0] for row in table] == [*result.federation.problem.initial_model(), "all"]
    assert bits(dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST)) == bits(result)


def test_it_can_synthesize_again(tmp_path: Path) -> None:
    again = run_tiny(tmp_path / "r", **SMALL | {"dynafed__resynthesize_every": 2, "dynafed__include_initial": True})
    assert [record["round"] for record in again.history if "inner_lr" in record] == [4, 6, 8]
    kept = tree.unnest(tree.unnest(again.state.server["dynafed"])["trajectory"])
    assert sorted(kept) == ["000004", "000005", "000006", "000007", "000008"]


def test_evidence_and_watched_clients_are_written_down(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 1, 8, 8)).astype(np.float32)
    y = np.arange(200) % 4
    x[np.arange(200), 0, y, :] += 2
    config = tiny(**SMALL | {"dynafed__evidence": True, "watch": [0, 5], "participation": 1.0})
    result = dynafed.run(config, train=(x, y), test=(x, y), out=tmp_path / "r")
    record = result.history[3]
    assert set(record["cosine_by_segment"]) == {"D_syn", "real samples", "noise"}
    assert list(record["matching_by_segment"]) == ["0", "1"]
    assert 0 <= record["scratch_accuracy"] <= 1
    seen = result.history[-1]["watch"]["5"]
    assert len(seen["local"]) == -(-len(result.federation.data.partition[5]) // 16)
    assert seen["aggregated"] > 0
    assert seen["refined"] != seen["aggregated"]
    assert {"synthetic.png", "synthetic-000000.png", "synthetic-000010.png", "report.json"} <= {
        entry.name for entry in (tmp_path / "r").iterdir()
    }
    page = dynafed.report.write_report([tmp_path / "r"]).read_text()
    assert "Synthetic samples and their labels" in page
    assert "Loss of watched clients" in page


def test_what_can_t_work_is_refused_before_round_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=r"raise dynafed\.trajectory"):
        tiny(method="dynafed", dynafed__trajectory=4)
    with pytest.raises(UserError, match="BatchNorm"):
        dynafed.run(
            tiny(**SMALL),
            train=TRAIN,
            test=TEST,
            model=lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)),
            out=tmp_path / "r",
        )
    with pytest.raises(UserError, match="beyond the last"):
        tiny(watch=[8])
    run_tiny(tmp_path / "short", **SMALL | {"rounds": 2})
    assert "no synthesis is used" in caplog.text


def test_a_model_that_never_moves_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    still = run_tiny(tmp_path / "r", **SMALL | {"lr": 1e-30, "rounds": 6})
    assert "no synthesis in round 4" in caplog.text
    assert "no synthesis in round 6" in caplog.text
    assert torch.equal(still.state.model["head.bias"], still.federation.problem.initial_model()["head.bias"])
