"""The in-process engine: one client loop, one server round, one run."""
