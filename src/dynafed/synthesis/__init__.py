"""Synthesize a small dataset from a trajectory of checkpoints, so that training on it follows the trajectory."""

from dynafed.synthesis.matching import matching_gradient
from dynafed.synthesis.refine import finetune
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import synthesize
from dynafed.synthesis.synthetic import SyntheticData

Synthetic = SyntheticData
"""The class's name up to 0.1."""

__all__ = ["DynaFedSettings", "Synthetic", "SyntheticData", "finetune", "matching_gradient", "synthesize"]
