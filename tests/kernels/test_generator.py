"""The kernel that trains FedGen's generator against torch in double precision."""

from __future__ import annotations

import pytest
import torch

from dynafed import generator, kernels
from dynafed.kernels import build
from dynafed.optim import Optimizer
from dynafed.tree import Tree, column_major

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C++ compiler here")


def fresh(noise: int, classes: int, hidden: int, width: int) -> Tree:
    torch.manual_seed(0)
    net = generator.fresh(noise, classes, hidden, width)
    net |= {"1.weight": torch.rand(hidden) + 0.5, "1.bias": torch.randn(hidden)}
    return column_major(net, ["0.weight", "3.weight"])


@pytest.mark.parametrize(
    ("noise", "classes", "hidden", "width", "heads", "batch"), [(8, 10, 32, 48, 5, 16), (3, 4, 16, 16, 1, 7)]
)
def test_the_generator_takes_torchs_steps(
    noise: int, classes: int, hidden: int, width: int, heads: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = fresh(noise, classes, hidden, width)
    exact = {name: tensor.double().requires_grad_() for name, tensor in net.items()}
    weights = torch.randn(heads, classes, width) / width**0.5, torch.randn(heads, classes)
    trust = torch.rand(heads, classes)
    drawn = [(torch.randint(classes, (batch,)), torch.randn(batch, noise)) for _ in range(4)]
    adam = Optimizer("adam", list(net.values()), 1e-3, weight_decay=0.01)
    losses = kernels.train_generator(net, adam, weights, trust, drawn, 2.0)

    each = [{"head.weight": one.double(), "head.bias": two.double()} for one, two in zip(*weights, strict=True)]
    said = generator.all_heads(lambda own, z: z @ own["head.weight"].t() + own["head.bias"], each)
    theirs = torch.optim.Adam(list(exact.values()), 1e-3, weight_decay=0.01)
    eye = torch.eye
    monkeypatch.setattr(torch, "eye", lambda classes, device: eye(classes, device=device, dtype=torch.float64))
    for ours, (labels, noises) in zip(losses, drawn, strict=True):
        loss = generator.generator_loss(exact, said, trust.double(), noises.double(), labels, 2.0)
        assert float(ours) == pytest.approx(loss.item(), rel=1e-5)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
    for name, tensor in exact.items():
        if name != "0.bias":  # the norm takes it away: its gradient is nothing but rounding
            torch.testing.assert_close(net[name].double(), tensor.detach(), rtol=1e-3, atol=2e-5)
    assert float(adam.moments["step"][0]) == 4


def test_the_kernel_refuses_what_it_would_misread() -> None:
    net = fresh(3, 4, 16, 16)
    adam = Optimizer("adam", list(net.values()), 1e-3)
    heads, trust, labels = (
        (torch.zeros(2, 4, 16), torch.zeros(2, 4)),
        torch.zeros(2, 4),
        torch.zeros(5, dtype=torch.long),
    )
    with pytest.raises(ValueError, match="doesn't fit"):
        kernels.train_generator(net, adam, heads, trust, [(labels, torch.zeros(5, 4))], 1.0)
    with pytest.raises(ValueError, match="every step must have 5"):
        kernels.train_generator(net, adam, heads, trust, [(labels[:4], torch.zeros(5, 3))], 1.0)
    assert not kernels.generator_fits(fresh(3, 4, 20, 16))
