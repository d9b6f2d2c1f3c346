"""Data for three hospitals, nothing alike: each one's folder gets a file of its own, the server's one to test with."""

from pathlib import Path

import numpy as np

from dynafed import data

images = data.load("fmnist-mini")
x, y = images.train_x.numpy(), images.train_y.numpy()
for number, classes in enumerate([(0, 1, 2, 3), (3, 4, 5), (6, 7, 8, 9)]):
    rows = np.flatnonzero(np.isin(y, classes))[number::20]
    folder = Path(f"hospital{number}")
    folder.mkdir(exist_ok=True)
    np.savez(folder / "data.npz", x=x[rows], y=y[rows])
    print(f"{folder}: {len(rows)} images of the classes {', '.join(map(str, classes))}")
Path("server").mkdir(exist_ok=True)
np.savez("server/test.npz", x=images.test_x.numpy()[:1000], y=images.test_y.numpy()[:1000])
