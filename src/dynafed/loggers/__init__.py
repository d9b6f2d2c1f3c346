"""Callbacks that log a run where people already look: TensorBoard, Weights & Biases, MLflow.

    dynafed.run(config, callbacks=[dynafed.loggers.TensorBoard()])

On the command line: `dynafed run demo --log tensorboard`. Each is an extra of its own, such as `dynafed[tensorboard]`.
"""

from __future__ import annotations

from dynafed.loggers.mlflow import MLflow
from dynafed.loggers.tensorboard import TensorBoard
from dynafed.loggers.wandb import WandB

__all__ = ["MLflow", "TensorBoard", "WandB"]
