"""The page in a real browser: what its script does, how it fits, and that it asks for nothing."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.cli.report import write_report
from tests.run_folders import prediction, train_row, validation_row, write_evaluation

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window, at 1280 x 900."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage",
                     "--window-size=1280,900"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(autouse=True)
def as_usual(browser: Any) -> None:
    """Undo what the test before has set."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def open_page(browser: Any, *folders: Path) -> Path:
    page = write_report(folders)
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(page.as_uri())
    return page


def set_width(browser: Any, width: int) -> None:
    size = {"width": width, "height": 760, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def run_script(browser: Any, script: str) -> Any:
    return browser.execute_script(f"return {script}")


def shown_ids(browser: Any) -> list[str]:
    return run_script(browser, "[...document.querySelectorAll('.example b')].map(b => b.innerText)")


def set_control(browser: Any, control: str, value: str, event: str = "change") -> None:
    browser.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event(arguments[2]))",
        control, value, event,
    )  # fmt: skip


def search(browser: Any, words: str) -> str:
    """Type; what the pager then says."""
    set_control(browser, "query", words, "input")
    return browser.execute_async_script(
        "const done = arguments[0];"
        "setTimeout(() => done(document.getElementById('position').innerText), 250)"
    )


def check_no_trouble(browser: Any, page: Path) -> None:
    """No message on the console, nothing fetched but the page itself."""
    assert browser.get_log("browser") == []
    messages = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    urls = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in urls if url != page.as_uri()] == []


def test_sorting_search_and_paging(browser: Any, make_run) -> None:
    page = open_page(browser, make_run())  # scores of row n: 37 n mod 101
    expected = sorted(range(45), key=lambda n: (n * 37 % 101, n))
    assert shown_ids(browser) == [f"row-{n}" for n in expected[:10]]
    browser.find_element("id", "next").click()
    assert shown_ids(browser) == [f"row-{n}" for n in expected[10:20]]
    assert run_script(browser, "document.getElementById('position').innerText") == "11 to 20 of 45"
    set_control(browser, "order", "down")
    assert shown_ids(browser) == [f"row-{n}" for n in expected[:-11:-1]]
    set_control(browser, "sort", "")
    assert shown_ids(browser)[0] == "row-44"
    assert search(browser, '"RICE 7."') == "1 to 1 of 1"
    assert shown_ids(browser) == ["row-7"]
    assert run_script(browser, "document.querySelector('mark').innerText") == "rice 7."
    assert search(browser, "row-7 rice (") == "0 of 45 in test"
    assert search(browser, "row-7 rice") == "1 to 1 of 1"
    marked = "[...document.querySelectorAll('mark')].map(m => m.innerText)"
    assert set(run_script(browser, marked)) == {"row-7", "rice"}
    assert run_script(browser, "document.querySelector('svg .curve') !== null")
    check_no_trouble(browser, page)


@pytest.mark.long
def test_hostile_texts_are_only_text(browser: Any, make_run) -> None:
    nasty = "</script><img src=x onerror=\"document.title='bad'\">\u2028\x00\ud800<b>b</b>"
    folder = make_run(evaluated=False, **{"model.name": nasty})
    row = prediction(0, id=nasty, document=nasty, reference="\u0645\u0631\u062d\u0628\u0627",
                     prediction=f"\u202e{nasty}")  # fmt: skip
    write_evaluation(folder, "test", 1, [row], hints=[nasty])
    page = open_page(browser, folder)
    assert run_script(browser, "document.images.length") == 0
    assert run_script(browser, "document.title").startswith("run")
    every = "[...document.querySelectorAll('.example .text')].map(t => t.textContent)"
    # As JSON, since the driver can't hand over half a character.
    assert json.loads(run_script(browser, f"JSON.stringify({every})"))[0] == nasty
    assert run_script(
        browser, "getComputedStyle(document.querySelectorAll('.text')[1]).direction"
    ) == "rtl"  # fmt: skip
    check_no_trouble(browser, page)


@pytest.mark.long
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_page_scrolls_sideways(browser: Any, make_run, width: int) -> None:
    long_name = "a-run-with-a-long-name-" * 4
    row = prediction(0, id="i" * 200, document="x" * 3000, reference="y" * 500)
    folders = [make_run(f"{long_name}{n}", **{"model.name": "m" * 200}) for n in "ab"]
    write_evaluation(folders[0], "validation", 500, [row])
    for chosen in (folders[:1], folders):
        set_width(browser, width)
        open_page(browser, *chosen)
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        set_control(browser, "evaluation", "1")
        # clientWidth is without the scroll bar at the side.
        room = run_script(browser, "document.documentElement.clientWidth")
        assert run_script(browser, "document.documentElement.scrollWidth") == room >= width - 20


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_both_schemes(browser: Any, make_run, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    open_page(browser, make_run(state="failed"))
    paper = color_of(browser, "document.body", "backgroundColor")
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    for selector, least in {
        "body": 7, ".note": 4.5, ".state-failed": 4.5, "a": 4.5, ".warnings li": 4.5,
        ".swatch .s0": 3, ".swatch .s1": 3, ".swatch .s2": 3, ".swatch .s3": 3, ".tick": 4.5,
    }.items():  # fmt: skip
        name = "stroke" if "swatch" in selector else "fill" if selector == ".tick" else "color"
        color = color_of(browser, f"document.querySelector('{selector}')", name)
        assert contrast(color, paper) >= least, selector


def color_of(browser: Any, element: str, name: str) -> list[float]:
    text = run_script(browser, f"getComputedStyle({element}).{name}")
    return [float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]]


def luminance(color: list[float]) -> float:
    """Relative luminance of sRGB, WCAG 2.2."""
    parts = [c / 255 for c in color]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.long
def test_runs_are_compared_example_by_example(browser: Any, make_run) -> None:
    folders = [make_run(name, evaluated=False) for name in ("a", "b")]
    rows = [prediction(n, prediction=f"first {n}") for n in range(2)]
    write_evaluation(folders[0], "test", 500, rows)
    others = [
        prediction(0, prediction="second", rougeLsum=0.25),
        prediction(1, reference="another example's"),
    ]
    write_evaluation(folders[1], "test", 500, others)
    open_page(browser, *folders)
    columns = "[...document.querySelectorAll('.texts > div:last-child')].map(d => d.innerText)"
    found = [text.split("\n") for text in run_script(browser, columns)]
    assert [[line for line in lines if line] for lines in found] == [
        ["Summary of a", "first 0", "Summary of b, ROUGE-Lsum 25.0", "second"],
        ["Summary", "first 1"],
    ]


@pytest.mark.long
def test_on_paper_there_are_no_controls(browser: Any, make_run) -> None:
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    media = {"media": "print", "features": [feature]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    open_page(browser, make_run())
    for selector in ("nav", ".controls", ".pager"):
        shown = f"getComputedStyle(document.querySelector('{selector}')).display"
        assert run_script(browser, shown) == "none"
    assert luminance(color_of(browser, "document.body", "backgroundColor")) == 1.0
    paper = browser.find_element("id", "paper")
    assert "evaluation/step-00000500/test/predictions.jsonl" in paper.text
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert base64.b64decode(pdf).startswith(b"%PDF")


@pytest.mark.long
def test_values_are_read_off_by_pointer_and_keyboard(browser: Any, make_run) -> None:
    from selenium.webdriver import ActionChains, Keys

    rows = [train_row(step, loss=float(step)) for step in (10, 20, 30)]
    open_page(browser, make_run(rows=[*rows, validation_row(30)]))
    figure = browser.find_element("css selector", "figure.panel")
    readout = figure.find_element("class name", "readout")
    figure.send_keys(Keys.END)
    assert readout.text == "step 30: training 30.00 · validation 2.47"
    figure.send_keys(Keys.ARROW_LEFT)
    assert readout.text == "step 20: training 20.00"
    figure.send_keys(Keys.ESCAPE)
    assert readout.text == ""
    svg = figure.find_element("css selector", "svg:not(.swatch)")
    # Steps 0 to 30 go from 46 to 368 of the drawing's 380 units.
    offset = (46 + 322 * 21 / 30 - 190) * svg.rect["width"] / 380
    ActionChains(browser).move_to_element_with_offset(svg, round(offset), 0).perform()
    assert readout.text == "step 20: training 20.00"


@pytest.mark.long
@pytest.mark.parametrize(("width", "num_runs"), [(360, 1), (1280, 1), (360, 9), (1280, 9)])
def test_reading_values_moves_nothing(browser: Any, make_run, width: int, num_runs: int) -> None:
    names = [f"a-run-with-a-name-{n}" for n in range(num_runs)]
    set_width(browser, width)
    open_page(browser, *(make_run(name, evaluated=False) for name in names))
    moved = browser.execute_script(
        """
        const height = () => document.documentElement.scrollHeight;
        const before = height();
        const found = [];
        for (const figure of document.querySelectorAll("figure.panel")) {
          for (const key of ["Home", "ArrowRight", "End", "ArrowLeft"]) {
            figure.dispatchEvent(new KeyboardEvent("keydown", { key }));
            const { textContent, scrollHeight, clientHeight } = figure.querySelector(".readout");
            if (height() !== before || !textContent || scrollHeight > clientHeight + 1) {
              found.push(textContent);
            }
          }
          figure.dispatchEvent(new FocusEvent("blur"));
        }
        return found;
        """
    )
    assert moved == []


@pytest.mark.long
def test_what_is_cut_is_marked(browser: Any, make_run) -> None:
    folder = make_run(evaluated=False)
    write_evaluation(folder, "test", 500, [prediction(0, document="word " * 2000)])
    open_page(browser, folder)
    marks = "[...document.querySelectorAll('.cut')].map(m => m.textContent)"
    assert run_script(browser, marks) == ["cut: 8,000 of 10,000 characters", "…"]
    assert search(browser, "word word") == "1 to 1 of 1"
    assert search(browser, "characters") == "0 of 1 in test"


@pytest.mark.long
def test_axes_have_labels_that_do_not_overlap(browser: Any, make_run) -> None:
    rows = [train_row(step, every=997) for step in range(997, 99_700, 997)]
    rows += [validation_row(step) for step in range(9_970, 99_700, 9_970)]
    for width in (360, 1280):
        set_width(browser, width)
        open_page(browser, make_run(f"run-{width}", rows))
        overlaps = browser.execute_script(
            """
            const found = [];
            for (const figure of document.querySelectorAll("figure.panel")) {
              const boxes = [...figure.querySelectorAll(".tick, figcaption")]
                .map((e) => [e.textContent, e.getBoundingClientRect()]);
              boxes.forEach(([name, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
                if (a.left < b.right && b.left < a.right && a.top < b.bottom - 1 &&
                    b.top < a.bottom - 1) found.push([name, other]);
              }));
            }
            return found;
            """
        )
        assert overlaps == []


@pytest.mark.long
def test_five_thousand_examples_stay_quick(browser: Any, make_run) -> None:
    folder = make_run(evaluated=False)
    rows = [prediction(n, document="how to rinse the rice " * 100) for n in range(5577)]
    write_evaluation(folder, "test", 500, rows)
    open_page(browser, folder)
    spent = browser.execute_script(
        """
        const times = [];
        for (const [id, value] of [["sort", "1"], ["order", "down"], ["sort", ""]]) {
          const began = performance.now();
          const control = document.getElementById(id);
          control.value = value;
          control.dispatchEvent(new Event("change"));
          times.push(performance.now() - began);
        }
        return times;
        """
    )
    assert max(spent) < 1000  # milliseconds; about 30 on an idle machine
    assert search(browser, "rinse the rice 5576.").endswith("of 1")
