"""The paper's tables and figures, rerun: a grid of runs for each, and our numbers beside the paper's."""
