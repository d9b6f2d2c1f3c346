"""Pictures of a run's synthetic data, by class: from noise to the end, with class names."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from dynafed.report.load import Run, snapshots
from dynafed.report.text import escape, percent, plural

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Images = NDArray[np.float64]

CARDS = 20
"""Classes that are shown with everything; of the others only the surest sample."""
OTHERS = 4
"""Further samples of a class, shown small."""
SHEET_COLUMNS = 10
"""Samples side by side in a `synthetic-<iteration>.png`."""


def class_gallery(run: Run) -> str:
    """A card for each class: its surest sample, how that came about, the class mean and more samples.

    Reads `synthetic.safetensors` and `synthetic-<iteration>.png`. Empty if the run has no synthetic images.
    """
    loaded = _load(run)
    if loaded is None:
        return ""
    import numpy as np

    x, labels = loaded
    low, high = np.percentile(x, (1, 99))
    images = np.clip((x - low) / max(high - low, 1e-6), 0, 1)
    stages = _stages(run, x.shape[2], x.shape[3])
    names = run.partition.names if run.partition is not None else ()
    chief = labels.argmax(axis=1)
    cards, rest = [], []
    for index in range(labels.shape[1]):
        name = names[index] if index < len(names) else f"class {index}"
        order = (-labels[:, index]).argsort(kind="stable")
        # Only the first samples are in the pictures of earlier iterations; one of them stands for the class if it can.
        pictured = [i for i in order if i < min((len(tiles) for _, tiles in stages), default=0)]
        best = next((i for i in pictured if chief[i] == index), (pictured or list(order))[0])
        sure = percent(float(labels[best, index]), 0)
        alt = f"{name}, synthetic sample {best}"
        if index >= CARDS:
            rest.append(_figure(images[best], alt, f"{name}, {sure}"))
            continue
        strip = [
            _figure(tiles[best], f"{name} at iteration {iteration}", str(iteration))
            for iteration, tiles in stages
            if best < len(tiles)
        ]
        mean = (labels[:, index, None, None, None] * x).sum(axis=0) / labels[:, index].sum() - x.mean(axis=0)
        mean = mean / (np.abs(mean).max() or 1.0) / 2 + 0.5
        more = [
            _figure(images[i], f"{name}, synthetic sample {i}", percent(float(labels[i, index]), 0))
            for i in [i for i in order if chief[i] == index and i != best][:OTHERS]
        ]
        cards.append(
            f'<article><h4>{escape(name)}</h4><div class="strip two">{_figure(mean, f"mean of {name}", "class mean")}'
            f"{_figure(images[best], alt, f'sample, {sure}')}</div>"
            + "".join(f'<div class="strip">{"".join(figures)}</div>' for figures in (strip, more) if figures)
            + "</article>"
        )
    more_classes = (
        f"<details><summary>{plural(len(rest), 'more class', 'more classes')}</summary>"
        f'<div class="images crisp small">{"".join(rest)}</div></details>'
        if rest
        else ""
    )
    stage_text = " Below: that sample at earlier iterations, from noise to the end." if stages else ""
    return (
        "<h3>Synthetic samples and their labels</h3>"
        f'<p class="lead">{plural(len(x), "synthetic sample")}, by class. Left: what the class mean adds to the mean '
        "of all, every sample weighted by its label. Right: a sample, with the class’s share of its learned label."
        f"{stage_text} Last: further samples whose likeliest class it is. They need not look like real data: they "
        "move a network as the clients’ data did.</p>"
        f'<div class="gallery">{"".join(cards)}</div>{more_classes}'
    )


def _load(run: Run) -> tuple[Images, Images] | None:
    """Samples (n, channels, height, width) and label distributions (n, classes)."""
    path = run.path / "synthetic.safetensors"
    if not path.is_file():
        return None
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        x, logits = tensors["x"].astype(np.float64), tensors["logits"].astype(np.float64)
    except (OSError, KeyError, ValueError, TypeError, SafetensorError):
        return None
    if x.ndim != 4 or logits.ndim != 2 or not len(x) or len(x) != len(logits) or not np.isfinite(x).all():
        return None
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return x, odds / odds.sum(axis=1, keepdims=True)


def _stages(run: Run, height: int, width: int) -> list[tuple[int, Images]]:
    """(iteration, tiles cut from its picture), in order; the last is the end."""
    import numpy as np
    from PIL import Image

    found = []
    for iteration, path in snapshots(run.path):
        try:
            sheet = np.asarray(Image.open(path).convert("RGB"), dtype=np.float64) / 255
        except (OSError, ValueError):
            continue
        rows, columns = sheet.shape[0] // height, sheet.shape[1] // width
        if columns == SHEET_COLUMNS:
            tiles = sheet.reshape(rows, height, columns, width, 3).transpose(0, 2, 4, 1, 3)
            tiles = tiles.reshape(rows * columns, 3, height, width)
            # Empty places at the end of the last row are black.
            while len(tiles) and not tiles[-1].any():
                tiles = tiles[:-1]
            found.append((iteration, tiles))
    return found


def _figure(image: Images, alt: str, caption: str) -> str:
    return f"<figure>{_img(image, alt)}<figcaption>{escape(caption)}</figcaption></figure>"


def _img(image: Images, alt: str) -> str:
    """An `img` element with the picture (channels, height, width), values 0 to 1, in it."""
    import numpy as np
    from PIL import Image

    pixels = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
    gray = len(pixels) != 3 or bool((pixels[0] == pixels[1]).all() and (pixels[0] == pixels[2]).all())
    made = Image.fromarray(pixels[0] if gray else pixels.transpose(1, 2, 0).copy())
    file = io.BytesIO()
    made.save(file, "PNG", optimize=True)
    return f'<img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}" alt="{escape(alt)}">'
