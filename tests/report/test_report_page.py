from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import MakeRun, add_synthetic, synthesis_record
from safetensors.numpy import save_file

from dynafed.errors import UserError
from dynafed.report import write_report
from dynafed.report.text import (
    THIN,
    duration,
    join_limited,
    mean_std_percent,
    number,
    percent,
    script_json,
    setting,
    size,
)

VOID = {"meta", "link", "img", "br"}
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Checker(HTMLParser):
    """Collects elements and fails when tags don't nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"stray </{tag}>"
        assert self.open.pop() == tag


def check(path: Path) -> tuple[str, Checker, dict[str, Any]]:
    """Read a page; it must be well formed, and nothing in it may come from elsewhere."""
    text = path.read_text("utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    for tag, attributes in checker.seen:
        assert "onerror" not in attributes
        for name in ("src", "href"):
            value = attributes.get(name) or ""
            assert not re.match(r"(?i)(https?:|//|javascript:|file:)", value), (tag, value)
    assert sum(tag == "script" for tag, _ in checker.seen) == 2
    assert "@import" not in text
    assert "url(" not in text
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return text, checker, json.loads(found[1])


def own(text: str, place: int) -> str:
    return f'<b class="own" style="--c:var(--c{place})">{text}</b>'


def plots(checker: Checker) -> list[dict[str, str | None]]:
    return [attributes for _, attributes in checker.seen if "data-chart" in attributes]


def png(width: int = 4, height: int = 4) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = (b"\0" + bytes(range(width))) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_the_page_of_one_run(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["accuracy_before_refine"] = record["accuracy"] - 0.05
        record["norm"] = index / 3
        record["kept"] = 160

    run = make_run(rounds=30, method="fedavg+dynafed", each=each, target_accuracy=0.5, uneven=True)
    out = write_report([run])
    assert out == run / "report.html"
    text, checker, data = check(out)
    final = json.loads((run / "summary.json").read_text())["final_accuracy"]
    assert f"<b>{percent(final)}</b> final accuracy" in text
    assert "30 rounds in 54" in text
    assert "fedavg+dynafed on fmnist-mini" in text
    assert "8 clients, 4 a round" in text.replace("\u00a0", " ")
    assert "Reached the target" in text
    assert "+5.00" in text
    assert "dynafed run " in text
    assert "torch 2.13.0" in text
    assert "mlp.width" in text
    assert "of 10 classes</b> hold 90" in text
    assert "Clients hold" in text
    assert "No client dropped out" in text
    assert "The same in every round: kept = 160." in text
    assert "unfinished" not in text.split("</header>")[0]
    assert {spec["kind"] for spec in data["charts"].values()} == {"lines", "stack", "heat"}
    assert all(plot["aria-label"] and plot["tabindex"] == "0" for plot in plots(checker))
    assert len(plots(checker)) == len(data["charts"]) == 5
    accuracy = data["charts"]["c0"]
    assert [line["name"] for line in accuracy["series"]] == ["accuracy", "before refinement"]
    assert len(data["numbers"]["rows"]) == 30


def test_the_policy_lets_only_the_pages_own_script_run(make_run: MakeRun) -> None:
    text, checker, _ = check(write_report([make_run(rounds=1)]))
    policy = next(a["content"] for tag, a in checker.seen if tag == "meta" and "content" in a and "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_text_from_outside_stays_text(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["rejected"] = [{"client": NASTY, "reason": NASTY}, NASTY]
        record[NASTY] = index

    blocks = [
        {"title": NASTY, "text": NASTY, "kind": "lines", "data": {"x": [1], "series": {NASTY: [1]}, "xlabel": NASTY}},
        {"title": NASTY, "kind": "table", "data": {"columns": [NASTY], "rows": [[NASTY]]}},
        {"title": NASTY, "kind": NASTY},
        {"title": "x", "kind": "images", "data": {"images": [{"src": "data:image/png;base64,AA==", "caption": NASTY}]}},
    ]
    keys = {"method": NASTY, "dataset": NASTY, "model": NASTY, "each": each, "blocks": blocks}
    one = make_run("one", rounds=2, **keys)
    two = make_run("two", rounds=2, seed=1, **keys)
    three = make_run("three", rounds=2, lr=0.5, **keys)
    for paths in ([one], [one, two], [one, two, three]):
        text, checker, _ = check(write_report(paths, one.parent / "out.html"))
        assert "<script>alert" not in text
        assert all(a.get("src", "data:") != "x" for tag, a in checker.seen if tag == "img")


def test_an_unfinished_run_is_shown_and_marked(make_run: MakeRun) -> None:
    run = make_run(rounds=7, planned=50, finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 8, "acc')
    text, _, data = check(write_report([run]))
    assert '<span class="badge">unfinished</span>' in text
    assert "so far" in text
    assert "7 of 50 rounds done" in text
    assert f"dynafed resume {run}" in text
    assert data["charts"]["c0"]["series"][0]["x"] == list(range(1, 8))


def test_a_run_before_its_first_round(make_run: MakeRun) -> None:
    run = make_run(finished=False, planned=9)
    (run / "metrics.jsonl").write_text("")
    text, _, _ = check(write_report([run]))
    assert "No accuracy yet; 0 of 9 rounds done." in text
    assert "No round has been evaluated yet." in text


def test_a_run_without_partition_or_times(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        for key in list(record):
            if key not in ("round", "accuracy"):
                del record[key]

    run = make_run(rounds=3, each=each, finished=False)
    other = make_run("other", rounds=3, each=each, finished=False, seed=1)
    for path in (run, other):
        (path / "partition.json").unlink()
    text, _, data = check(write_report([run]))
    assert "Who holds which classes" not in text
    assert "<h2>Cost" not in text
    assert [spec["kind"] for spec in data["charts"].values()] == ["lines"]
    text, _, _ = check(write_report([run, other], run.parent))
    assert "Cost of a round" not in text
    assert "data-axis" not in text


def test_evaluations_now_and_then_and_diverged_losses(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["train_loss"] = float("nan") if index > 6 else 1.0
        if index % 5:
            del record["accuracy"], record["loss"]

    text, _, data = check(write_report([make_run(rounds=10, each=each, eval_every=5)]))
    assert data["charts"]["c0"]["series"][0]["x"] == [5, 10]
    assert data["charts"]["c1"]["series"][1]["y"][-1] is None
    assert "Loss not finite in 4 rounds." in text


def test_events_are_told_with_their_reasons(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        if index == 2:
            record |= {"dropped": list(range(20)), "rejected": [{"client": 3, "reason": "norm 1e9 > 10"}]}
        if index == 3:
            record |= {"repeats": 2, "skipped": True}

    text, _, data = check(write_report([make_run(rounds=4, each=each)]))
    assert "20 updates never came, in 1 round; 1 update rejected; 1 round repeated; 1 round skipped." in text
    assert "rejected client 3: norm 1e9 &gt; 10" in text
    assert "and 8 more" in text
    assert "repeated 2 times; skipped: the model was kept" in text
    assert "events" in {spec["kind"] for spec in data["charts"].values()}


def test_many_events_are_cut(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynafed.report.single.MOST_EVENTS", 3)
    text, _, _ = check(write_report([make_run(rounds=5, each=lambda i, record: record.update(dropped=[i]))]))
    assert "and 2 more rounds" in text


def test_the_page_of_several_runs(make_run: MakeRun, tmp_path: Path) -> None:
    for method, top in (("fedavg", 0.5), ("moon", 0.8)):
        for seed in range(3):
            make_run(f"grid/{method}/{seed}", method=method, seed=seed, top=top + seed / 100, target_accuracy=0.6)
    out = write_report([tmp_path / "grid"])
    assert out == tmp_path / "grid" / "report.html"
    text, checker, data = check(out)
    scores = {
        method: [json.loads((tmp_path / "grid" / method / str(s) / "summary.json").read_text()) for s in range(3)]
        for method in ("fedavg", "moon")
    }
    finals = [summary["final_accuracy"] for summary in scores["moon"]]
    mean = sum(finals) / 3
    std = (sum((value - mean) ** 2 for value in finals) / 2) ** 0.5
    assert f"{own('moon', 1)} ends highest: {own(mean_std_percent(mean, std), 1)} over 3 seeds" in text
    assert "2 methods on fmnist-mini" in text
    assert "not reached" in text
    assert text.index("moon</td>") < text.index("fedavg</td>")
    keys = [attributes for _, attributes in checker.seen if attributes.get("class") == "key"]
    assert [key["aria-pressed"] for key in keys] == ["true", "true"]
    kinds = [spec["kind"] for spec in data["charts"].values()]
    assert kinds.count("heat") == 3
    accuracy = data["charts"]["c0"]
    assert [line["name"] for line in accuracy["series"]] == ["fedavg", "moon"]
    assert accuracy["series"][0]["n"] == [3] * 20
    assert accuracy["marks"][0]["y"] == 0.6
    links = [attributes["href"] or "" for tag, attributes in checker.seen if tag == "a"]
    assert [link for link in links if not link.startswith("#")] == [
        f"{method}/{seed}/" for method in ("fedavg", "moon") for seed in range(3)
    ]
    assert f"points above {own('fedavg', 0)} (baseline, " in text
    assert "the longest counts" not in text


def test_seeds_of_one_setting(make_run: MakeRun) -> None:
    paths = [make_run(str(seed), seed=seed) for seed in range(2)]
    text, _, data = check(write_report(paths, paths[0].parent))
    assert "fedavg on fmnist-mini, 2 seeds" in text
    assert "band: the range of two seeds" in text
    assert 'class="key"' not in text
    assert len(data["charts"]["c0"]["series"]) == 1


def test_a_lead_within_the_spread_and_a_lone_seed_are_called_so(make_run: MakeRun) -> None:
    close = [make_run(f"{m}-{s}", method=m, seed=s, top=0.5 + s / 10) for m in ("fedavg", "moon") for s in (0, 1)]
    text, _, _ = check(write_report(close, close[0].parent))
    assert "that lead is within the spread of the seeds" in text
    text, _, _ = check(write_report(close[::2], close[0].parent))
    assert "one seed doesn’t tell how sure that is" in text


def test_different_tasks_are_not_ranked_against_each_other(make_run: MakeRun) -> None:
    paths = [make_run(f"{m}-{a}", method=m, alpha=a, top=0.4 + a) for m in ("fedavg", "moon") for a in (0.01, 0.1)]
    text, _, _ = check(write_report(paths, paths[0].parent))
    lines = re.findall(r"<li>(.*?)</li>", text)
    assert [line.partition(":")[0] for line in lines] == ["alpha=0.01", "alpha=0.1"]
    assert all("ends highest" in line and "points above" in line for line in lines)
    many = [make_run(f"t{n}", alpha=float(n), rounds=2, clients=2) for n in range(1, 13)]
    text, _, _ = check(write_report(many, paths[0].parent))
    assert "<li>and 4 more</li>" in text
    assert "6 more partitions" in text


def test_unfinished_doubled_and_damaged_runs_are_said_in_a_comparison(make_run: MakeRun) -> None:
    paths = [
        make_run("a"),
        make_run("b"),
        make_run("c", method="moon", finished=False, rounds=5, planned=20),
        make_run("d", method="moon", finished=False, rounds=1, planned=20, seed=1),
    ]
    (paths[3] / "metrics.jsonl").write_text("")
    (paths[0] / "partition.json").write_text("{")
    (paths[1] / "report.html").write_text("")
    text, checker, _ = check(write_report(paths, paths[0].parent))
    assert "2 of 4 runs unfinished" in text
    assert "so far" in text
    assert "the longest counts" in text
    assert "a: partition.json is not valid JSON" in text
    assert "b/report.html" in [attributes.get("href") for tag, attributes in checker.seen if tag == "a"]
    text, _, _ = check(write_report([paths[3], paths[2]], paths[0].parent))
    (paths[2] / "metrics.jsonl").write_text("")
    text, _, _ = check(write_report(paths[2:], paths[0].parent))
    assert "no accuracy yet." in text


def test_blocks_of_report_json(make_run: MakeRun) -> None:
    uri = "data:image/png;base64," + base64.b64encode(png()).decode()
    blocks = [
        {"title": "Images", "text": "One.\n\nTwo.", "kind": "images",
         "data": {"pixelated": True, "images": [{"src": "sub/syn.png", "caption": "a"}, {"src": uri}]}},
        {"title": "Lines", "kind": "lines", "data": {"x": [3, 1, 2], "series": {"s": [30, None, float("nan")]}}},
        {"title": "Bars", "kind": "bars", "data": {"labels": ["a", 2], "series": {"s": [1, 2]}, "format": "bytes"}},
        {"title": "Table", "kind": "table", "data": {"columns": ["k", "v"], "rows": [["a", 1.23456789], ["b", None]]}},
        {"text": "words alone"},
    ]  # fmt: skip
    run = make_run(rounds=2, blocks=blocks)
    (run / "sub").mkdir()
    (run / "sub" / "syn.png").write_bytes(png())
    text, checker, data = check(write_report([run]))
    assert [attributes["src"] for tag, attributes in checker.seen if tag == "img"] == [uri, uri]
    assert "<p>One.</p><p>Two.</p>" in text
    assert "<p>words alone</p>" in text
    lines, bars = (next(s for s in data["charts"].values() if s["title"] == title) for title in ("Lines", "Bars"))
    assert lines["series"][0]["x"] == [1, 2, 3]
    assert lines["series"][0]["y"] == [None, None, 30]
    assert bars["labels"] == ["a", "2"]
    assert bars["format"] == "bytes"
    assert "1.2346</td>" in text
    assert "can’t be shown" not in text
    both = write_report([run, make_run("other", rounds=2, seed=1)], run.parent)
    assert text.count(uri) == both.read_text("utf-8").count(uri)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("text", "unknown kind"),
        ({"kind": "pie", "data": {}}, "unknown kind 'pie'"),
        ({"kind": "lines"}, "data must have 'x'"),
        ({"kind": "lines", "data": {"x": ["a"], "series": {}}}, "x must be numbers"),
        ({"kind": "lines", "data": {"x": [1, 2], "series": {"s": [1]}}}, "series 's' must have 2 values"),
        ({"kind": "lines", "data": {"x": [1], "series": {"s": ["x"]}}}, "series 's' must be numbers"),
        ({"kind": "bars", "data": {"labels": ["a"]}}, "data must have 'series'"),
        ({"kind": "table", "data": {"columns": ["a"], "rows": [[1, 2]]}}, "each row must have 1 cells"),
        ({"kind": "images", "data": {"images": ["x.png"]}}, "data must have 'src'"),
        ({"kind": "images", "data": {"images": [{"src": "../secret.png"}]}}, "not a PNG inside the run folder"),
        ({"kind": "images", "data": {"images": [{"src": "link.png"}]}}, "not a PNG inside the run folder"),
        ({"kind": "images", "data": {"images": [{"src": "config.toml"}]}}, "not a PNG inside the run folder"),
        ({"kind": "images", "data": {"images": [{"src": "fake.png"}]}}, "'fake.png' is not a PNG"),
        ({"kind": "images", "data": {"images": [{"src": "data:text/html,x"}]}}, "a data URI must be"),
        ({"kind": "images", "data": {"images": [{"src": "https://a.b/c.png"}]}}, "not a PNG inside"),
    ],
)
def test_a_block_that_cannot_be_shown_says_why(make_run: MakeRun, block: Any, why: str) -> None:
    run = make_run(rounds=1, blocks=[block])
    (run.parent / "secret.png").write_bytes(png())
    (run / "link.png").symlink_to(run.parent / "secret.png")
    (run / "fake.png").write_text("not an image")
    text, checker, _ = check(write_report([run]))
    assert why.replace("'", "&#x27;") in text
    assert not any(tag == "img" for tag, _ in checker.seen)


def test_the_leader_is_compared_with_the_baseline_and_with_the_next(make_run: MakeRun) -> None:
    tops = {"dynafed": 0.9, "fedprox": 0.8, "fedavg": 0.4}
    paths = [make_run(f"{m}-{s}", method=m, seed=s, top=t) for m, t in tops.items() for s in range(3)]
    text, _, _ = check(write_report([*paths[:6], paths[6]], paths[0].parent))
    headline = text.partition('<p class="verdict">')[2].partition("</p>")[0]
    assert headline.startswith(f"{own('dynafed', 0)} ends highest")
    assert headline.index("points above " + own("fedavg", 2)) < headline.index("points above " + own("fedprox", 1))
    assert "the numbers of seeds differ: dynafed 3, fedprox 3, fedavg 1" in headline
    assert "one seed doesn’t tell" in headline
    text, _, _ = check(write_report(paths[3:], paths[0].parent))
    assert text.count("points above") == 1
    assert "seeds differ" not in text


def test_different_numbers_of_rounds_are_compared_at_the_common_one(make_run: MakeRun) -> None:
    def climb(index: int, record: dict[str, Any]) -> None:
        record["accuracy"] = index / 100

    def slow(index: int, record: dict[str, Any]) -> None:
        record["accuracy"] = index / 200

    paths = [make_run("a", rounds=10, each=climb), make_run("b", method="moon", rounds=30, each=slow)]
    text, _, _ = check(write_report(paths, paths[0].parent))
    assert f"{own('fedavg, rounds=10', 0)} is highest: {own(percent(0.08), 0)} with one seed, 4.00 points above" in text
    assert "compared at round 10, the last that every run has" in text
    assert ">At round 10</button>" in text
    assert text.index("fedavg, rounds=10</td>") < text.index("moon, rounds=30</td>")


def test_runs_that_cannot_differ_are_not_ranked(make_run: MakeRun) -> None:
    paths = [make_run("a", workers=1), make_run("b", workers=2, watch=[0], eval_every=1)]
    text, _, data = check(write_report(paths, paths[0].parent))
    assert "ends highest" not in text
    assert len(data["charts"]["c0"]["series"]) == 1
    twins = [make_run(name, each=lambda i, r: r.update(accuracy=0.5), lr=lr) for name, lr in (("c", 0.1), ("d", 0.2))]
    text, _, _ = check(write_report(twins, paths[0].parent))
    assert f"{own('fedavg, lr=0.1', 0)} and {own('fedavg, lr=0.2', 1)} end equal: " in text


def test_numbers_of_the_synthesis_stand_in_one_table_and_its_time_apart(make_run: MakeRun) -> None:
    paths = [
        make_run(f"{m}-{s}", method=m, seed=s, each=synthesis_record if m == "dynafed" else None)
        for m in ("fedavg", "dynafed")
        for s in (0, 1)
    ]
    text, _, data = check(write_report(paths, paths[0].parent))
    assert {s["title"] for s in data["charts"].values() if s["kind"] == "lines"} == {
        "Accuracy", "Loss", "accuracy before refinement", "clients’ training loss",
    }  # fmt: skip
    assert text.count("matching loss</td>") == 1
    assert 'data-v="0.915"' in text
    assert "Each of 4 segments" in text
    assert "D_syn is the small synthetic dataset" in text
    assert "Synthesis, once" in text
    assert f"+ 20{THIN}s synthesis, once" in text
    assert data["charts"]["c0"]["xmarks"] == [{"x": 8, "label": "synthesis", "groups": [1]}]
    assert "↑ higher is better" in text
    assert "↓ lower is better" in text
    text, _, data = check(write_report([paths[2]]))
    assert f"synthesis 20{THIN}s" in text
    stack = next(spec for spec in data["charts"].values() if spec["kind"] == "stack")
    assert max(map(max, (part["y"] for part in stack["series"]))) < 2


def test_synthetic_images_are_shown_by_class_with_names(make_run: MakeRun) -> None:
    run = add_synthetic(make_run(rounds=12, method="dynafed", each=synthesis_record), channels=3)
    summary = json.loads((run / "summary.json").read_text())
    names = ["boot", *(f"thing {i}" for i in range(1, 9)), NASTY]
    (run / "summary.json").write_text(json.dumps(summary | {"class_names": names}))
    images = {"images": [{"src": "synthetic-000000.png"}]}
    (run / "report.json").write_text(json.dumps([{"title": "Stages", "kind": "images", "data": images}]))
    text, checker, data = check(write_report([run]))
    alts = [attributes["alt"] for tag, attributes in checker.seen if tag == "img"]
    # A class has its mean, its sample at the end and at three iterations, and three samples more.
    assert len(alts) == 10 * 8
    assert alts[:5] == ["mean of boot", "boot, synthetic sample 0", *(f"boot at iteration {n}" for n in (0, 125, 200))]
    assert "<h4>boot</h4>" in text
    assert "Stages" not in text
    assert next(spec for spec in data["charts"].values() if spec["kind"] == "heat")["names"] == names
    other = make_run("other", rounds=12)
    text, _, _ = check(write_report([other, run], run.parent))
    assert text.count('<div class="gallery">') == 1
    assert "Shown is that of dynafed, seed 0." in text
    many = add_synthetic(make_run("many", rounds=2, classes=30), classes=30)
    text, _, _ = check(write_report([many]))
    assert text.count("<article>") == 20
    assert "10 more classes" in text


@pytest.mark.parametrize("content", [b"", b"not a tensor", None])
def test_synthetic_data_that_cannot_be_shown_is_left_out(make_run: MakeRun, content: bytes | None) -> None:
    run = make_run(rounds=2)
    if content is None:
        arrays = {"x": np.zeros((4, 12), np.float32), "logits": np.zeros((4, 3), np.float32)}
        save_file(arrays, run / "synthetic.safetensors")
    else:
        (run / "synthetic.safetensors").write_bytes(content)
    text, _, _ = check(write_report([run]))
    assert '<div class="gallery">' not in text


def test_too_many_images_are_left_out(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynafed.report.page.MOST_IMAGE_CHARACTERS", 1000)
    blocks = [{"title": "Images", "kind": "images", "data": {"images": [{"src": "a.png"}]}}] * 20
    run = make_run(rounds=1, blocks=blocks)
    (run / "a.png").write_bytes(png())
    text, _, _ = check(write_report([run]))
    assert 0 < text.count("<img") < 20
    assert "Left out to keep this page small" in text


def test_accuracy_by_class_and_client_where_it_was_measured(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["accuracy_per_class"] = [index / 10, 0.5, None]
        record["accuracy_per_client"] = {"3": 0.9, "1": 0.1}

    paths = [make_run(str(seed), rounds=3 + seed, planned=4, seed=seed, each=each, classes=3) for seed in (0, 1)]
    _, _, data = check(write_report(paths, paths[0].parent))
    charts = {spec["title"]: spec for spec in data["charts"].values()}
    assert charts["Accuracy by class"]["series"][0]["y"] == [0.35, 0.5, None]
    assert charts["Accuracy by class"]["labels"] == ["0", "1", "2"]
    assert charts["Accuracy by client"]["series"][0]["y"] == [0.1, 0.9]
    assert "accuracy per client: 1" not in charts


def test_watched_clients_are_small_multiples_on_one_scale(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["watch"] = {"2": {"local": [4.0, 3.0], "aggregated": 2.0}, "10": {"refined": 1.0}}

    _, _, data = check(write_report([make_run(rounds=2, each=each)]))
    two, ten = (next(s for s in data["charts"].values() if s["title"] == f"Client {c}") for c in (2, 10))
    assert two["series"][0]["x"] == [0.4, 0.8, 0.9, 1.4, 1.8, 1.9]
    assert ten["series"][0]["y"] == [1.0, 1.0]
    assert two["ymax"] == ten["ymax"]


def test_where_the_page_goes(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run("a", rounds=1), make_run("b", rounds=1, seed=1)]
    monkeypatch.chdir(tmp_path)
    assert write_report(runs) == Path("report.html")
    assert write_report([tmp_path]) == tmp_path / "report.html"
    assert write_report(runs, tmp_path / "new" / "x.html") == tmp_path / "new" / "x.html"
    assert write_report([runs[0]], tmp_path / "new") == tmp_path / "new" / "report.html"
    with pytest.raises(UserError, match="can't write"):
        write_report(runs, runs[0] / "config.toml" / "x.html")


def test_words_for_numbers() -> None:
    assert [duration(s).replace(THIN, " ") for s in (None, 0.004, 0.42, 4.2, 42, 60, 723, 11520, 183600)] == [
        "–", "4 ms", "0.42 s", "4.2 s", "42 s", "1 min", "12 min 3 s", "3 h 12 min", "2 d 3 h",
    ]  # fmt: skip
    assert [size(n).replace(THIN, " ") for n in (None, 0, 999, 1000, 1.234e6, 999_600, 5e15)] == [
        "–", "0 B", "999 B", "1 kB", "1.23 MB", "1 MB", "5000 TB",
    ]  # fmt: skip
    assert [number(v).replace(THIN, " ") for v in (None, True, 9999, 12345, 0.1234567, "x")] == [
        "–", "true", "9999", "12 345", "0.12346", "x",
    ]  # fmt: skip
    assert percent(None) == "–"
    assert mean_std_percent(0.5, None) == f"50.00{THIN}%"
    assert join_limited(range(4), 2) == "0, 1 and 2 more"
    assert [setting(v) for v in ("a", True, [1, 2], 0.1)] == ["a", "true", "[1, 2]", "0.1"]
    assert script_json({"a": ["</x>&", float("nan")]}) == '{"a":["\\u003c/x\\u003e\\u0026",null]}'
