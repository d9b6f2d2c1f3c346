"""Plain training of the MLP with Adam, many steps in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dynafed.kernels.build import address, function
from dynafed.optim import BETAS, EPS, Optimizer


class MLPTraining:
    """Minimizes the mean cross-entropy of a fully connected ReLU network.

    `params` are weight, bias, weight, bias, ..., the weights column-major; they are those of the optimizer.
    """

    def __init__(self, params: Sequence[Tensor], optimizer: Optimizer) -> None:
        self.function, self.optimizer = function("mlp_train"), optimizer
        weights = params[::2]
        if not all(weight.t().is_contiguous() for weight in weights):
            raise ValueError("the weights must be column-major")
        sizes = [weights[0].shape[1], *(len(weight) for weight in weights)]
        self.inputs, self.layers = sizes[0], ctypes.c_int64(len(weights))
        self.sizes = (ctypes.c_int64 * len(sizes))(*sizes)
        own = {parameter.data_ptr(): number for number, parameter in enumerate(optimizer.params)}
        tensors = []
        for parameter in params:
            number = own[parameter.data_ptr()]
            tensors += [parameter, *(optimizer.moments[moment][number] for moment in ("exp_avg", "exp_avg_sq"))]
        self.tensors = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))

    def __call__(self, x: Tensor, y: Tensor, order: np.ndarray, batch: int) -> Tensor:
        """Take a step for each `batch` of the samples in this order; the losses before each."""
        if x[0].numel() != self.inputs or not (x.is_contiguous() and y.is_contiguous()):
            raise ValueError(f"samples must have {self.inputs} numbers and be contiguous")
        steps, optimizer = -(-len(order) // batch), self.optimizer
        losses = torch.empty(steps)
        order = np.ascontiguousarray(order, np.int64)
        self.function(
            address(x),
            address(y),
            order.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(len(order)),
            ctypes.c_int64(batch),
            self.layers,
            self.sizes,
            self.tensors,
            ctypes.c_int64(int(optimizer.counter)),
            *map(ctypes.c_double, (optimizer.lr, *BETAS, EPS, optimizer.weight_decay)),
            ctypes.c_int64(optimizer.name == "adamw"),
            address(losses),
        )
        optimizer.counter += steps
        return losses
