"""Differential privacy for each client as a whole: clipped updates, Gaussian noise, and a ledger."""

from __future__ import annotations

from dynafed.privacy.dp import Clip, PrivateAverage
from dynafed.privacy.settings import DpSettings, dp_settings

__all__ = ["Clip", "DpSettings", "PrivateAverage", "dp_settings"]
