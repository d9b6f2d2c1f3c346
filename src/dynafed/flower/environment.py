"""Turns off the telemetry of Flower and Ray, which read these variables at import; a value set by the user stays."""

import os

DEFAULTS = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
