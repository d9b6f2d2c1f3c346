"""From a trajectory of checkpoints to a few samples that train the way it went."""

from dynafed.synthesis.dataset import Synthetic
from dynafed.synthesis.matching import matching_gradient
from dynafed.synthesis.refine import finetune
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import synthesize

__all__ = ["DynaFedSettings", "Synthetic", "finetune", "matching_gradient", "synthesize"]
