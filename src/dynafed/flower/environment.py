"""Environment variables: the telemetry of Flower and Ray is off unless the user turned it on; the Ray cluster."""

import os

DEFAULTS = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)


def ray_address() -> str:
    """The address of the Ray cluster that the user wants; empty to start one on this machine."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address
