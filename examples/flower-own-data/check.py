"""Trains on the same files in one process, and compares all that the server holds, bit for bit."""

from pathlib import Path

import dynafed

there = Path("runs/own-data")
config = dynafed.Config.load(there / "config.toml").replace(engine="local")
files = sorted(Path().glob("hospital*/data.npz"))
here = dynafed.run(config, clients=files, test="server/test.npz", out="runs/one-process").path
final = f"checkpoint/round-{config.rounds:06d}/state.safetensors"
if (there / final).read_bytes() != (here / final).read_bytes():
    raise SystemExit("the weights differ")
print("the same bits on three nodes and in one process")
