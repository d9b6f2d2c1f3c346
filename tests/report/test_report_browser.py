"""The page in a real browser: the charts are drawn, nothing fails, and the values can be read from them."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_runs import MakeRun

from dynafed.report import write_report
from dynafed.report.groups import mean_curve
from dynafed.report.load import load_run
from dynafed.report.text import percent

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

CATCH = """<script>
window.failures = [];
window.onerror = (message, source, line) => { window.failures.push(message + " at line " + line); };
</script>"""

HELPERS = """
const plots = () => [...document.querySelectorAll(".plot")];
const tip = () => document.getElementById("tip");
const mouse = (box, x, y) => box.dispatchEvent(new MouseEvent("mousemove", { bubbles: true, clientX: x, clientY: y }));
const press = (box, key) => box.dispatchEvent(new KeyboardEvent("keydown", { bubbles: true, key }));
const points = path => path.getAttribute("d").match(/[ML][^MLh]+/g).map(p => p.slice(1).split(",").map(Number));
const hover = (box, path, index) => {
  const bounds = box.querySelector("svg").getBoundingClientRect(), [x, y] = points(path)[index];
  mouse(box, bounds.left + x + 1, bounds.top + y);
  return tip().hidden ? null : tip().textContent;
};
"""


def dump(page: Path, folder: Path, width: int = 1200) -> str:
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def ask(page: Path, folder: Path, script: str, style: str = "") -> dict[str, Any]:
    """What `script` returns in a copy of the page, which has no policy so that the test's own scripts run."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text("utf-8"))
    body = f"const answer = (() => {{{HELPERS}{script}}})(); answer.failures = window.failures;"
    out = 'const out = document.createElement("pre"); out.id = "answer"; out.textContent = JSON.stringify(answer);'
    text = (
        text.replace("<head>", f"<head>{CATCH}")
        .replace("</style>", f"{style}</style>", 1)
        .replace("</body>", f"<script>{body}{out}document.body.append(out);</script></body>")
    )
    copy = folder / "copy.html"
    copy.write_text(text, "utf-8")
    dom = dump(copy, folder, width=500 if style else 1200)
    found = re.search(r'<pre id="answer">(.*?)</pre>', dom, re.S)
    assert found is not None, dom[-3000:]
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert answer["failures"] == []
    return answer


BLOCKS = [
    {"title": "Lines", "kind": "lines", "data": {"x": [1, 2, 4], "series": {"a": [1, None, 3], "b": [-2, 0, 2]}}},
    {
        "title": "Bars",
        "kind": "bars",
        "data": {"labels": ["first label", "b"], "series": {"p": [1, -2], "q": [3, None]}},
    },
    {"title": "Table", "kind": "table", "data": {"columns": ["k", "v"], "rows": [["a", 9], ["b", 10], ["c", None]]}},
]


def test_one_run_under_its_own_policy(make_run: MakeRun, tmp_path: Path) -> None:
    dom = dump(write_report([make_run(rounds=20)]), tmp_path)
    assert dom.count('<path class="line') == 3
    assert dom.count('<path class="area"') == 4
    assert 'class="heat"' in dom


def test_one_run_can_be_read(make_run: MakeRun, tmp_path: Path) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["accuracy_before_refine"] = record["accuracy"] - 0.05
        record["norm"] = index**2 / 7
        record["bytes_up"] += index
        record["dropped"] = [1, 2] if index == 4 else []
        if index == 6:
            record["loss"] = float("nan")

    run = make_run(rounds=20, each=each, uneven=True, target_accuracy=0.6, blocks=BLOCKS)
    answer = ask(
        write_report([run]),
        tmp_path,
        """
        const [accuracy, , heat, time] = plots();
        const line = accuracy.querySelector(".line:not(.thin)");
        const read = { drawn: plots().map(p => p.querySelectorAll("svg path").length), points: points(line).length };
        read.at10 = hover(accuracy, line, 9);
        read.dots = accuracy.querySelectorAll("g .dot").length;
        press(accuracy, "End"); read.last = tip().textContent;
        press(accuracy, "ArrowLeft"); read.before = tip().textContent;
        press(accuracy, "Escape"); read.gone = tip().hidden;
        press(heat, "ArrowRight"); read.heat = tip().textContent;
        document.querySelector("[data-order=id]").click();
        press(plots()[2], "ArrowRight"); read.first = tip().textContent;
        press(time, "Home"); read.time = tip().textContent;
        const reads = box => { press(box, "Escape"); press(box, "ArrowRight"); return !tip().hidden; };
        read.silent = plots().filter(box => !reads(box)).length;
        const numbers = document.querySelector("details.numbers");
        numbers.open = true;
        numbers.dispatchEvent(new Event("toggle"));
        read.rows = numbers.querySelectorAll("tbody tr").length;
        const table = document.querySelector("table.sortable");
        const order = () => [...table.tBodies[0].rows].map(r => r.cells[0].textContent).join("");
        const by = table.querySelectorAll("th button")[1];
        by.click(); read.down = order(); by.click(); read.up = order();
        read.wide = document.documentElement.scrollWidth > innerWidth;
        read.bad = document.querySelectorAll('[d*="NaN"], [x*="NaN"], [y*="NaN"], [cx*="NaN"]').length;
        return read;
        """,
    )
    records = load_run(run).rounds
    assert all(answer["drawn"])
    assert answer["points"] == 20
    for text, record in ((answer["at10"], records[9]), (answer["last"], records[19]), (answer["before"], records[18])):
        assert text.startswith(f"round {record['round']}")
        assert f"accuracy{percent(record['accuracy'])}" in text
        assert f"before refinement{percent(record['accuracy_before_refine'])}" in text
    assert answer["dots"] == 2
    assert answer["gone"]
    assert re.match(r"client \d+class \d+\d+ of \d+", answer["heat"])
    assert answer["first"].startswith("client 0")
    assert "clients" in answer["time"]
    assert answer["silent"] == 0
    assert answer["rows"] == 20
    assert (answer["down"], answer["up"]) == ("bac", "abc")
    assert not answer["wide"]
    assert answer["bad"] == 0


def test_a_comparison_can_be_read_and_curves_switched(make_run: MakeRun, tmp_path: Path) -> None:
    paths = [
        make_run(f"{method}-{seed}", method=method, seed=seed, top=top, rounds=rounds[seed], planned=12)
        for method, top, rounds in (("fedavg", 0.4, (12, 12, 12)), ("moon", 0.7, (12, 12, 8)))
        for seed in range(3)
    ]
    answer = ask(
        write_report(paths, tmp_path / "out.html"),
        tmp_path,
        """
        const accuracy = plots()[0], read = {};
        const count = what => accuracy.querySelectorAll(what).length;
        read.lines = count(".line:not(.partial)"); read.bands = count(".band"); read.partial = count(".partial");
        read.labels = [...accuracy.querySelectorAll(".direct")].map(t => t.textContent);
        press(accuracy, "Home"); read.first = tip().textContent;
        press(accuracy, "End"); read.last = tip().textContent;
        const [fedavg, moon] = document.querySelectorAll(".key");
        fedavg.click(); read.one = count(".line:not(.partial)"); read.pressed = fedavg.getAttribute("aria-pressed");
        press(accuracy, "Home"); read.alone = tip().textContent;
        fedavg.click(); read.both = count(".line:not(.partial)");
        moon.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
        read.solo = fedavg.getAttribute("aria-pressed");
        fedavg.click(); moon.click(); fedavg.click(); read.none = accuracy.textContent;
        fedavg.click(); moon.click();
        document.querySelector("[data-axis=traffic]").click();
        press(accuracy, "Home"); read.traffic = tip().textContent;
        const cells = () => [...document.querySelector(".results").tBodies[0].rows].map(r => r.cells[0].textContent);
        read.order = cells();
        document.querySelector(".results th button").click(); read.byName = cells();
        return read;
        """,
    )
    runs = [load_run(path) for path in paths]
    assert (answer["lines"], answer["bands"], answer["partial"]) == (2, 2, 1)
    assert sorted(answer["labels"]) == ["fedavg", "moon"]
    for start, label in ((0, "fedavg"), (3, "moon")):
        joined = mean_curve(run.points("accuracy") for run in runs[start : start + 3])
        assert f"{label}{percent(joined.mean[0])}" in answer["first"]
        few = " (2 of 3 seeds)" if label == "moon" else ""
        assert f"{label}{few}{percent(joined.mean[-1])}" in answer["last"]
    assert (answer["one"], answer["pressed"], answer["both"]) == (1, "false", 2)
    assert "fedavg" not in answer["alone"]
    assert answer["solo"] == "false"
    assert answer["none"] == "nothing to draw"
    assert answer["traffic"].startswith("1.6\u202fMB")
    assert answer["order"] == ["moon", "fedavg"]
    assert answer["byName"][0] == "fedavg"


def test_a_phone_shows_it_without_scrolling_sideways(make_run: MakeRun, tmp_path: Path) -> None:
    paths = [
        make_run(f"{alpha}", alpha=alpha, rounds=1, classes=100, clients=30, method="scaffold+dynafed")
        for alpha in (0.01, 10.0)
    ]
    answer = ask(
        write_report(paths, tmp_path / "out.html"),
        tmp_path,
        """
        const clipped = [...document.querySelectorAll(".plot text")].filter(t => {
          const inside = t.getBoundingClientRect(), around = t.closest(".panel").getBoundingClientRect();
          return inside.left < around.left || inside.right > around.right;
        });
        const { scrollWidth, clientWidth } = document.querySelector("main");
        return { clipped: clipped.map(t => t.textContent), scrolls: scrollWidth, wide: clientWidth };
        """,
        style="main { width: 360px; }",  # the browser's own windows are no narrower than 500 pixels
    )
    assert answer == {"clipped": [], "scrolls": 360, "wide": 360, "failures": []}
