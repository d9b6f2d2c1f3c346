"""Tabular data by hospital: FedAvg against DynaFed. No hospital has the outcomes of the others.

    python examples/own-data/tabular.py

Writes hospitals.csv with a column `hospital`, in place of files that you have, and runs both methods on it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import dynafed


def write_hospitals(file: Path, patients: int = 1200, hospitals: int = 12) -> None:
    """Patients whose outcome depends on age, pressure and dose; each hospital treats mostly one outcome."""
    rng = np.random.default_rng(0)
    age, pressure, dose = rng.normal(60, 12, patients), rng.normal(130, 20, patients), rng.normal(5, 2, patients)
    risk = (age - 60) / 12 + (pressure - 130) / 20 - (dose - 5) / 2 + rng.normal(0, 0.3, patients)
    outcome = np.array(["mild", "moderate", "severe"])[np.digitize(risk, [-0.7, 0.7])]
    usual = np.array(["mild", "moderate", "severe"])[np.arange(hospitals) % 3]
    rows = ["hospital,age,pressure,dose,outcome"]
    for number in range(patients):
        there = np.flatnonzero(usual == outcome[number]) if rng.random() < 0.9 else np.arange(hospitals)
        rows.append(
            f"hospital-{rng.choice(there):02d},{age[number]:.1f},{pressure[number]:.1f},{dose[number]:.2f},{outcome[number]}"
        )
    file.write_text("\n".join(rows))


def main(folder: Path = Path(), rounds: int = 30) -> dict[str, float]:
    """Run both methods on what each hospital holds out; returns their accuracy."""
    file = folder / "hospitals.csv"
    write_hospitals(file)
    found = {}
    for method in ("fedavg", "dynafed"):
        config = dynafed.Config.load(
            None,
            {
                "method": method,
                "rounds": rounds,
                "participation": 0.5,
                "evaluate": "clients",
                "data.path": str(file),
                "data.client": "hospital",
                "data.target": "outcome",
                "data.mean": [60, 130, 5],
                "data.std": [12, 20, 2],
                "mlp.width": 16,
                "dynafed.trajectory": rounds // 2,
                "dynafed.iterations": 50,
                "dynafed.inner_steps": 5,
                "dynafed.samples": 30,
            },
        )
        result = dynafed.run(config, out=folder / method)
        found[method] = result.final_accuracy
        worst = result.summary["accuracy_worst_tenth"]
        print(f"{method}: accuracy {result.final_accuracy:.1%}, worst tenth of the hospitals {worst:.1%}")
    print(dynafed.load(folder / "dynafed").predict([[75.0, 160.0, 2.0], [45.0, 100.0, 8.0]]))
    return found


if __name__ == "__main__":
    main()
