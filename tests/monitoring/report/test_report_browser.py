"""The report in a real browser, Chromium without a screen: what it draws is what metrics.jsonl says."""

from __future__ import annotations

import json
import math
import shutil
import time

import pytest
from monitoring.report.recorded import event, row

from pipeline.monitoring.report.page import encode_runs, render_page

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="chromium or chromedriver is not installed (Debian: chromium-driver)",
    ),
]
# Of each plot what plotly was given, by title. In a frame the page looks which are near, then it draws them.
DRAWN = """
  const answer = arguments[0], soon = (then) => requestAnimationFrame(() => setTimeout(then));
  soon(() => soon(() => {
    const places = [...document.querySelectorAll("#panels .plot")];
    if (isDrawing || waiting.size || places.some((each) => !each.data)) return answer(null);
    answer(Object.fromEntries(places.map((each) => [each.ariaLabel, {
      traces: each.data.map(({ x, y, name, meta, text, line }) => ({ x, y, name, meta, text, line })),
      range: each.layout.yaxis.range, title: each.layout.title.text,
      legend: [...each.querySelectorAll(".legendtext")].map((entry) => entry.textContent),
      paths: each.querySelectorAll("path.js-line, .points path").length,
    }])));
  }));
"""


class Browser:
    """A window, and what is seen in it."""

    def __init__(self, driver):
        self.driver = driver

    def look(self, width=1400, height=4000, scheme="light"):
        """Sizes the window; all plots of a page are in it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def set(self, control, value):
        """Sets a control of the page as a hand would."""
        said = """
          const control = document.querySelector(arguments[0]);
          control.type === "checkbox" ? control.checked = arguments[1] : control.value = arguments[1];
          control.dispatchEvent(new Event("input", { bubbles: true }));
        """
        self.run(said, control, value)

    def until(self, condition, seconds=60.0):
        """The first true value of `condition`."""
        deadline = time.monotonic() + seconds
        while (found := condition()) in (None, False):
            assert time.monotonic() < deadline, "it did not come"
            time.sleep(0.1)
        return found

    def drawn(self):
        return self.until(lambda: self.driver.execute_async_script(DRAWN))

    def curve(self, key):
        """(x, y) of what is drawn for a column."""
        traces = [
            each for plot in self.drawn().values() for each in plot["traces"] if each.get("meta") == key
        ]
        return traces[0]["x"], traces[0]["y"]

    def table(self, place):
        """The words of each row, sorted."""
        return sorted(
            line.split("\t") for line in self.run(f"return $('{place}').innerText").splitlines()[1:]
        )

    def problems(self):
        return [line for line in self.driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]


@pytest.fixture(scope="module")
def chromium():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(120)
    yield Browser(driver)
    driver.quit()


@pytest.fixture
def show(chromium, tmp_path):
    """`show(run, ...)` -> the browser with their page; at the end nothing may have gone wrong in it."""

    def function(*runs, **window):
        path = tmp_path / "page.html"
        path.write_text(render_page(encode_runs(runs)))
        chromium.look(**window)
        chromium.driver.get(path.as_uri())
        return chromium

    yield function
    assert chromium.problems() == []
    assert chromium.run("return performance.getEntriesByType('resource').length") == 0, "something was loaded"


def lines_of(steps, scale=1.0):
    """Rows with noise, an evaluation every 10, and what else a run of a language model says."""
    for step in range(1, steps + 1):
        loss = scale * (2 + 5 * math.exp(-step / 20) + 0.1 * math.sin(step * step))
        more = {"time/forward_seconds": 0.2, "time/backward_seconds": 0.3, "perf/elapsed_seconds": 0.7 * step}
        yield (
            row(step, loss=loss, grad_norm=1 + math.cos(step))
            | more
            | {"data/web_samples": step, "data/a & <b>_samples": 2 * step}
        )
        if step % 10 == 0:
            yield {"step": step, "eval/loss": loss + 0.1}


def test_one_run(make_run, show):
    lines = [*lines_of(60), event(30)]
    page = show(make_run(lines=lines))
    rows = [line for line in lines if "train/loss" in line]
    plots = page.drawn()
    assert set(plots) == {"Loss", "Gradient norm, before clipping", "Throughput, tokens/s", "Step time, s"}
    assert all(plot["paths"] > 0 for plot in plots.values())
    for key in ("train/loss", "train/grad_norm", "perf/tokens_per_second", "perf/step_time_seconds"):
        assert page.curve(key) == ([line["step"] for line in rows], [line[key] for line in rows])
    evaluations = [line for line in lines if "eval/loss" in line]
    assert page.curve("eval/loss") == ([10, 20, 30, 40, 50, 60], [line["eval/loss"] for line in evaluations])
    assert plots["Loss"]["traces"][-1]["x"] == [30]
    assert plots["Loss"]["traces"][-1]["text"] == ["loss_spike: what it is"]
    assert page.table("phases") == [
        ["backward", "42.9 % · 18"],
        ["forward", "28.6 % · 12"],
        ["startup, shutdown, dropped steps", "28.6 % · 12"],
    ]
    assert page.table("sources") == [["a & <b>", "66.7 % · 120"], ["web", "33.3 % · 60"]]
    page.run("document.querySelectorAll('details').forEach((each) => each.open = true)")
    text = page.run("return document.body.innerText")
    for words in ("small-1", "finished at step 60", "step 30", "loss_spike", "what to do", "it wrote this"):
        assert words in text


def test_controls(make_run, show):
    lines = list(lines_of(60))
    page = show(make_run(lines=lines))
    rows = [line for line in lines if "train/loss" in line]
    page.drawn()
    page.set("#x", "tokens")
    assert page.curve("train/loss")[0] == [line["train/tokens_seen"] for line in rows]
    page.set("#x", "hours")
    hours = [line["perf/elapsed_seconds"] / 3600 for line in rows]
    assert page.curve("train/loss")[0] == pytest.approx(hours, abs=1e-6)
    page.set("#log", True)
    page.set("#smoothing", "0.9")
    traces = page.drawn()["Loss"]["traces"]
    assert page.run("return document.querySelector('#panels .plot').layout.yaxis.type") == "log"
    total = norm = 0.0
    for line, shown in zip(rows, traces[1]["y"], strict=True):
        total = 0.9 * total + 0.1 * line["train/loss"]
        norm = 0.9 * norm + 0.1
        assert shown == pytest.approx(total / norm, rel=1e-6)


def test_a_crashed_run(make_run, show):
    lines = [row(1, loss=4.0), row(2, loss="NaN"), row(3, loss=3.0), event(2, "non_finite", level="error")]
    log = "2026-01-01 10:00:02,000 ERROR pipeline.failure <b>RuntimeError</b>: it broke\n"
    path = make_run(lines=lines, finished=False, log=log)
    page = show(path)
    assert page.curve("train/loss") == ([1, 2, 3], [4.0, None, 3.0])
    assert page.drawn()["Loss"]["traces"][-1]["text"] == ["non_finite: what it is"]
    text = page.run("return document.body.innerText")
    assert "failed at step 3" in text
    assert text.startswith(f"{path.name}\n<b>RuntimeError</b>: it broke\n")
    assert page.drawn()["Loss"]["traces"][-2]["text"] == ["train/loss: 1 not finite"]


def test_what_stands_in_files_does_nothing(make_run, show):
    hostile = "</script><img src=x onerror=alert(1)><b>%{y}"
    lines = [
        row(1) | {f"data/{n}{hostile}_samples": 3 for n in "ab"},
        event(1, hostile, message=hostile, more=hostile),
    ]
    run = make_run("<i>name", [*lines, event(1, "sample", prompt=hostile, text=hostile)])
    samples = [{"prompt": hostile, "target": hostile, "answer": hostile}]
    (run / "tasks").mkdir()
    (run / "tasks" / "step-00000001.json").write_text(json.dumps({"tasks": {hostile: {"samples": samples}}}))
    page = show(run)
    page.drawn()
    page.run("$('samples').open = $('tasks').open = true")
    assert page.run("return document.querySelectorAll('img, b b, td b, iframe').length") == 0
    assert page.run("return document.body.innerText.split(arguments[0]).length", hostile) == 11


@pytest.mark.nightly
def test_a_spike_and_a_constant_and_the_full_range(make_run, show):
    lines = [row(step, loss=2 + 0.1 * math.sin(step), learning_rate=1e-3) for step in range(1, 101)]
    lines[50]["train/loss"] = 1e4
    for line in lines[::2]:
        line["train/learning_rate"] *= 1 + 3e-16
    page = show(make_run(lines=lines))
    plots = page.drawn()
    low, high = plots["Loss"]["range"]
    assert low < 1.9
    assert 2.1 < high < 2.2
    assert "not in view: 10000" in plots["Loss"]["title"]
    assert plots["Learning rate"]["range"] == pytest.approx([0.9e-3, 1.1e-3])
    page.set("#full", True)
    plots = page.drawn()
    assert plots["Loss"]["range"][1] > 1e4
    assert "not in view" not in plots["Loss"]["title"]
    page.set("#log", True)
    low, high = page.drawn()["Loss"]["range"]
    assert low < math.log10(1.9)
    assert 4 < high < 5


@pytest.mark.nightly
def test_runs_are_told_apart_and_train_from_eval(make_run, show):
    page = show(*(make_run(name, list(lines_of(20))) for name in ("one", "two")))
    plot = page.drawn()["Loss"]
    assert plot["legend"] == ["one train/loss", "one eval/loss", "two train/loss", "two eval/loss"]
    styles = {
        each["name"]: (each["line"]["color"], each["line"]["dash"]) for each in plot["traces"] if each["line"]
    }
    assert len(set(styles.values())) == 4
    assert {name.split()[1]: dash for name, (_, dash) in styles.items()} == {
        "train/loss": "solid",
        "eval/loss": "dash",
    }
    assert len({color for name, (color, _) in styles.items() if name.startswith("one")}) == 1
    table = page.run("return document.getElementById('runs').innerText")
    loss = list(lines_of(20))[-1]["eval/loss"]
    said = f"{loss:.5g} at step 20, the lowest"
    assert f"eval/loss\t{said}\t{said}" in table


@pytest.mark.nightly
def test_all_plots_are_printed_dark_on_white(make_run, show):
    lines = [line | {f"own/{n}": 1.0 * n for n in range(5)} for line in lines_of(30)]
    page = show(make_run(lines=lines), height=300, scheme="dark")
    page.until(lambda: page.run("return !!document.querySelector('.plot').data"))
    assert not page.run("return $('others').open")
    page.run("""
      addEventListener("beforeprint", () => window.printed = [...document.querySelectorAll(".plot")].map(
        (each) => [each.ariaLabel, each.querySelectorAll("path.js-line, .points path").length,
          getComputedStyle(each.querySelector(".xtick text")).fill, each.clientWidth,
          each.querySelector(".main-svg").clientWidth]));
    """)
    page.driver.execute_cdp_cmd("Page.printToPDF", {})
    printed = page.run("return window.printed")
    assert {f"own/{n}" for n in range(5)} | {"Loss", "Step time, s"} <= {title for title, *_ in printed}
    for title, paths, colour, width, drawn in printed:
        assert paths > 0, title
        assert max(map(int, colour[4:-1].split(", "))) < 80, "dark on white"
        assert drawn == pytest.approx(width, abs=2)
        assert width < 360
    assert not page.run("return $('others').open")
    page.look(height=4000, scheme="dark")
    page.drawn()
    assert page.run("return document.querySelector('.plot').clientWidth") > 360


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "kind"), [(0, b"\x89PNG"), (1, b"<svg")])
def test_a_plot_is_saved(make_run, show, tmp_path, number, kind):
    page = show(make_run(lines=list(lines_of(30))), scheme="dark")
    page.drawn()
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    page.run("document.querySelectorAll('.plot .modebar-btn')[arguments[0]].click()", number)
    name = f"loss.{('png', 'svg')[number]}"
    page.until((tmp_path / name).is_file)
    picture = (tmp_path / name).read_bytes()
    assert picture.startswith(kind)
    if number == 0:
        assert [int.from_bytes(picture[at : at + 4]) for at in (16, 20)] == [2100, 1260]
    else:
        assert b"fill: rgb(0, 0, 0)" in picture
