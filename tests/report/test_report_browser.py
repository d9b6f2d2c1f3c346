"""The page in a real browser: the charts are drawn, nothing fails, and the values can be read from them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import BROWSER, FAULTS, HELPERS, Browser
from fake_runs import MakeRun, add_synthetic, synthesis_record
from PIL import Image

from dynafed.report import write_report
from dynafed.report.groups import mean_curve
from dynafed.report.load import load_run
from dynafed.report.text import percent, to_json_data

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


def ask(browser: Browser, page: Path, script: str, width: int = 1200) -> Any:
    """What `script` returns in the page; nothing may stand in the console."""
    browser.open(page, width)
    answer = browser.run(HELPERS + script)
    assert browser.errors == []
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


def test_one_run_under_its_own_policy(make_run: MakeRun, browser: Browser) -> None:
    count = """
    const count = what => document.querySelectorAll(what).length;
    return [count("path.line"), count("path.area"), count("path.heat") > 0];
    """
    assert ask(browser, write_report([make_run(rounds=20)]), count) == [3, 4, True]


def test_one_run_can_be_read(make_run: MakeRun, browser: Browser) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["accuracy_before_refine"] = record["accuracy"] - 0.05
        record["norm"] = index**2 / 7
        record["bytes_up"] += index
        record["dropped"] = [1, 2] if index == 4 else []
        if index == 6:
            record["loss"] = float("nan")

    run = make_run(rounds=20, each=each, uneven=True, target_accuracy=0.6, blocks=BLOCKS)
    answer = ask(
        browser,
        write_report([run]),
        """
        const [accuracy, heat, time] = ["accuracy", "8-clients-10-classes", "time-of-each-round"].map(chart);
        const line = accuracy.querySelector(".line:not(.thin)");
        const read = { drawn: plots().map(p => p.querySelectorAll("svg path").length), points: points(line).length };
        read.at10 = hover(accuracy, line, 9);
        read.dots = accuracy.querySelectorAll("g .dot").length;
        press(accuracy, "End"); read.last = tip().textContent;
        press(accuracy, "ArrowLeft"); read.before = tip().textContent;
        press(accuracy, "Escape"); read.gone = tip().hidden;
        press(heat, "ArrowRight"); read.heat = tip().textContent;
        document.querySelector("[data-order=id]").click();
        press(heat, "ArrowRight"); read.first = tip().textContent;
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


def test_a_comparison_can_be_read_and_curves_switched(make_run: MakeRun, browser: Browser, tmp_path: Path) -> None:
    paths = [
        make_run(f"{method}-{seed}", method=method, seed=seed, top=top, rounds=rounds[seed], planned=12)
        for method, top, rounds in (("fedavg", 0.4, (12, 12, 12)), ("moon", 0.7, (12, 12, 8)))
        for seed in range(3)
    ]
    answer = ask(
        browser,
        write_report(paths, tmp_path / "out.html"),
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
    assert answer["order"] == ["moon unfinished", "fedavg"]
    assert answer["byName"][0] == "fedavg"


def rich_runs(make_run: MakeRun, *, long_names: bool) -> list[Path]:
    """Runs with all that a page can show."""
    names = [f"class {'with a long name ' * long_names}{i}" for i in range(10)]

    def each(index: int, record: dict[str, Any]) -> None:
        synthesis_record(index, record)
        record["accuracy_per_class"] = [record["accuracy"] * (10 - i) / 10 for i in range(10)]
        record["accuracy_per_client"] = {str(i): record["accuracy"] * i / 8 for i in range(8)}
        record["norm"] = 90.0 if index == 5 else 1 + index / 40
        record["dropped"] = [1] if index == 4 else []
        record["watch"] = {"0": {"local": [2.0, 1.0], "aggregated": 1.5, "refined": 1.2}, "1": {"aggregated": 0.7}}
        record["bytes_up"] += index

    paths = []
    for method, top in (("fedavg", 0.5), ("dynafed", 0.7), ("scaffold+dynafed", 0.72)):
        for seed in (0, 1):
            keys = {"each": each if "dynafed" in method else None, "blocks": BLOCKS, "target_accuracy": 0.6}
            path = make_run(f"{method}-{seed}", method=method, seed=seed, top=top, rounds=40, uneven=True, **keys)
            partition = json.loads((path / "partition.json").read_text())
            (path / "partition.json").write_text(json.dumps(partition | {"class_names": names}))
            paths.append(add_synthetic(path) if "dynafed" in method else path)
    return paths


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_overlaps_or_fails_at_both_widths_and_themes(
    make_run: MakeRun, browser: Browser, tmp_path: Path, width: int
) -> None:
    paths = rich_runs(make_run, long_names=width > 1000)
    many = [
        make_run(f"{alpha}", alpha=alpha, rounds=1, classes=100, clients=30, method="scaffold+dynafed")
        for alpha in (0.01, 10.0)
    ]
    pages = [write_report(found, tmp_path / f"{i}.html") for i, found in enumerate((paths, paths[2:3], many))]
    for page in pages:
        assert page.stat().st_size < 3_000_000
        pixels = {}
        for dark in (False, True):
            browser.open(page, width, dark=dark)
            assert browser.run(FAULTS) == []
            assert browser.errors == []
            pixels[dark] = Image.open(io.BytesIO(browser.screenshot())).convert("L")
            assert pixels[dark].width == width
            # What is painted stays off the page's edge, whatever the elements say of themselves.
            edges = [pixels[dark].crop((x, 0, x + 8, pixels[dark].height)).getextrema() for x in (0, width - 8)]
            assert all(high - low <= 2 for low, high in edges)
        assert pixels[False].size == pixels[True].size
        assert pixels[False].getpixel((2, 2)) > 200 > 60 > pixels[True].getpixel((2, 2))  # type: ignore[operator]


def test_every_chart_has_a_table_csv_and_svg_and_curves_can_be_smoothed(make_run: MakeRun, browser: Browser) -> None:
    paths = rich_runs(make_run, long_names=False)
    answer = ask(
        browser,
        write_report([paths[2]]),
        """
        const read = { tables: [], files: [] };
        const keep = link => { read.files.push([link.download, decodeURIComponent(link.href)]); };
        HTMLAnchorElement.prototype.click = function () { keep(this); };
        for (const box of plots()) {
          const [table, csv, svg] = tools(box);
          table.click();
          const behind = box.closest(".panel").querySelector(".behind");
          read.tables.push([table.getAttribute("aria-expanded"), behind.querySelectorAll("td").length > 0]);
          csv.click(); svg.click(); table.click();
        }
        read.left = document.querySelectorAll(".behind").length;
        const accuracy = plots()[0], d = () => accuracy.querySelector(".line:not(.thin):not(.raw)").getAttribute("d");
        const before = d();
        read.marks = [...accuracy.querySelectorAll("text")].filter(t => t.textContent === "synthesis").length;
        document.querySelector("[data-smooth='5']").click();
        read.smoothed = d() !== before; read.raw = accuracy.querySelectorAll(".raw").length;
        document.querySelector("[data-smooth='1']").click();
        read.back = d() === before;
        read.spike = chart("norm").textContent;
        const links = [...document.querySelectorAll(".contents a")];
        read.anchors = links.every(a => document.getElementById(a.hash.slice(1)));
        return read;
        """,
    )
    charts = len(answer["tables"])
    assert charts > 8
    assert answer["tables"] == [["true", True]] * charts
    assert answer["left"] == 0
    assert len(answer["files"]) == 2 * charts
    files = dict(answer["files"])
    assert len(files) == 2 * charts
    lines = files["chart-accuracy.csv"].partition(",")[2].split("\r\n")
    records = load_run(paths[2]).rounds
    assert lines[0] == "round,accuracy,before refinement"
    assert lines[9] == ",".join(
        ["9", *(str(to_json_data(records[8][key])) for key in ("accuracy", "accuracy_before_refine"))]
    )
    for name, content in files.items():
        if name.endswith(".svg"):
            drawing = ElementTree.fromstring(content.partition(",")[2])
            assert drawing.tag.endswith("svg")
            assert "var(" not in content
    assert answer["marks"] == 1
    assert (answer["smoothed"], answer["raw"], answer["back"], answer["anchors"]) == (True, 2, True, True)
    assert "90" in answer["spike"]
    assert "80" not in answer["spike"]
