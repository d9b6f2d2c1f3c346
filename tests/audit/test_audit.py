"""The audit: its statistics by hand, what it finds where there is something to find, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import run_tiny, tiny

import dynafed
from dynafed import UserError
from dynafed.audit import audit, inversion, neighbors, subject
from dynafed.audit.membership import log_likelihood_ratio
from dynafed.audit.neighbors import nearness
from dynafed.audit.ownership import _guess, _regression
from dynafed.audit.statistics import auc, p_value, true_positive_rate, with_interval
from dynafed.cli import main


def test_rates_by_hand() -> None:
    ones, others = np.array([1.0, 2.0, 3.0]), np.array([0.0, 2.0])
    assert auc(ones, others) == pytest.approx((1 + 1.5 + 2) / 6)
    assert true_positive_rate(np.array([0.5, 1.5, 2.5]), np.arange(200) / 100) == pytest.approx(1 / 3)
    assert p_value(1.0, [0.0, 1.0, 2.0]) == 3 / 4
    rng = np.random.default_rng(0)
    estimate = with_interval(auc, rng.normal(1, 1, 300), rng.normal(0, 1, 300), rng)
    assert estimate.low < 0.76 < estimate.high  # the exact value is Phi(1 / sqrt 2)
    assert estimate.high - estimate.low < 0.12


def test_copies_are_found_and_fresh_samples_are_not() -> None:
    rng = np.random.default_rng(1)
    members, others, fresh = (torch.from_numpy(rng.normal(size=(60, 20))) for _ in range(3))
    labels = torch.arange(60) % 3
    copies = members + 0.1 * torch.from_numpy(rng.normal(size=(60, 20)))
    found = nearness(copies, labels, (members, labels), (others, labels), rng)
    nothing = nearness(fresh, labels, (members, labels), (others, labels), rng)
    assert found is not None
    assert nothing is not None
    assert found.p < 0.01
    assert found.difference.low > 0
    assert nothing.p > 0.05
    assert nearness(fresh[:1], labels[:1], (members[:1], labels[:1]), (others, labels), rng) is None
    assert nearness(fresh * torch.nan, labels, (members, labels), (others, labels), rng) is None
    copies[5:] = torch.inf
    few = nearness(copies, labels, (members, labels), (others, labels), rng)
    assert few is not None
    assert [number for number, _ in few.nearest] == [0, 3, 1, 4, 2]
    assert few.p < 0.05


def test_who_pulls_where_is_found_by_regression() -> None:
    rng = np.random.default_rng(2)
    pulls = rng.normal(size=(6, 4))
    cohorts = [sorted(rng.choice(6, 3, replace=False).tolist()) for _ in range(30)]
    moves = np.array([pulls[cohort].mean(0) for cohort in cohorts])
    scores = _guess(moves, _regression(cohorts, 6))
    assert np.corrcoef(scores.ravel(), (pulls - pulls.mean(0)).ravel())[0, 1] > 0.95


def test_the_likelihood_ratio_by_hand() -> None:
    # Seen: 2 and 4, mean 3; unseen: -1 and 1, mean 0; each spread has 2 squared over one degree of freedom.
    scores, seen = np.array([[2.0], [4.0], [-1.0], [1.0]]), np.array([[True], [True], [False], [False]])
    ratio = log_likelihood_ratio(np.array([3.0]), scores, seen)
    assert ratio == pytest.approx([0.5 * 9 / 2])


def test_a_network_that_is_all_too_sure_gives_no_nan(run: Path) -> None:
    audited = subject.load_subject(run)
    *_, bias = audited.federation.problem.trainable
    sure = audited.state.model | {bias: torch.tensor([1e6] + [0.0] * (audited.federation.problem.classes - 1))}
    target = {name: torch.ones_like(tensor) for name, tensor in sure.items()}
    drawn = inversion.invert(audited, sure, target, torch.zeros(1, dtype=torch.long), np.random.default_rng(0))
    assert drawn.isfinite().all()


def test_a_linear_first_layer_shows_its_input() -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    x = torch.randn(1, 3, 4)
    torch.nn.functional.cross_entropy(network(x), torch.tensor([1])).backward()
    gradient = {name: leaf.grad for name, leaf in network.named_parameters() if leaf.grad is not None}
    shown = inversion.read_off(gradient, (3, 4))
    assert shown is not None
    torch.testing.assert_close(shown, x.expand_as(shown))
    assert inversion.read_off({"conv.weight": torch.zeros(5, 1, 3, 3), "conv.bias": torch.zeros(5)}, (3, 4)) is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"dynafed.trajectory": 3, "dynafed.segment": 1, "dynafed.targets": [1], "dynafed.samples": 20}
    small |= {"dynafed.iterations": 5, "dynafed.inner_steps": 2, "dynafed.finetune_steps": 2, "dynafed.inner_lr": 0.1}
    config = tiny(dataset="digits", method="dynafed", rounds=5, optimizer="sgd", lr=0.1, **small)
    return dynafed.run(config, out=tmp_path_factory.mktemp("audit") / "run").path


def test_everything_on_a_small_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inversion, "ITERATIONS", 5)
    monkeypatch.setattr(neighbors, "PERMUTATIONS", 20)
    monkeypatch.setattr(subject, "SCRATCH", ("adam", 1e-3, 5))
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert main(["audit", str(run), "--shadows", "2", "--canaries", "4", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers == json.loads((run / "audit.json").read_text())
    findings = numbers["findings"]
    assert list(findings) == ["Nearest neighbors", "Membership", "Classes of clients", "Gradient inversion", "Canaries"]
    for name in ("the average", "the refined model", "a network trained on D_syn alone", "the final model"):
        for attack in (f"loss of {name}", f"likelihood ratio, {name}"):
            value, low, high = findings["Membership"][attack]["auc"]
            assert 0 <= low <= value <= high <= 1
    assert findings["Classes of clients"]["auc"][0] > 0.6
    assert 0 < findings["Classes of clients"]["p"] <= 1
    assert -1 <= findings["Classes of clients"]["d_syn_correlation"] <= 1
    page = (run / "audit.html").read_text()
    for words in ("What dynafed on digits gives away", "Not proved.", "so nothing is promised", "data:image/png"):
        assert words in page
    assert all(file.read_bytes() == content for file, content in before.items())
    again = audit(run, shadows=0, canaries=0)
    assert again.numbers["findings"]["Nearest neighbors"] == findings["Nearest neighbors"]
    assert len(again.findings) == 4


def test_what_can_t_be_audited_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        audit(tmp_path)
    with pytest.raises(UserError, match="pass train= and test="):
        audit(run_tiny(tmp_path / "r", rounds=1).path)


def test_a_run_whose_privacy_budget_is_spent_can_be_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion, "ITERATIONS", 2)
    run = dynafed.run(tiny(dataset="digits", rounds=2, dp__epsilon=8.0), out=tmp_path / "run").path
    done = audit(run, shadows=0, canaries=0)
    assert done.numbers["dp"]
    assert "The run had differential privacy." in done.page.read_text()


def test_a_run_with_secure_aggregation_can_be_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion, "ITERATIONS", 2)
    run = dynafed.run(tiny(dataset="digits", rounds=2, secure_aggregation=True), out=tmp_path / "run").path
    plain = dynafed.run(tiny(dataset="digits", rounds=2), out=tmp_path / "plain").path
    masked, clear = (audit(each, shadows=0, canaries=0).numbers["findings"]["Membership"] for each in (run, plain))
    assert masked["loss of the average"]["auc"] == pytest.approx(clear["loss of the average"]["auc"], abs=0.01)
