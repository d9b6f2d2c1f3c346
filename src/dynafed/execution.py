"""Which of a config's keys say how a run is executed. Apart from the rest, for the report needs it without torch."""

EXECUTION = frozenset(
    (
        "engine",
        "workers",
        "threads",
        "kernels",
        "record",
        "device",
        "data_dir",
        "checkpoint_every",
        "keep_checkpoints",
        "client_memory_mb",
    )
)
"""Keys that decide how a run is executed, not what it is to compute."""
