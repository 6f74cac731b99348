#!/usr/bin/env python3
"""The page of `octopage inspect` in a real browser, opened from a file.

    browser_test.py OCTOPAGE CASES [--large]

--large also holds a step of 16,384 rows and 131,072 tokens to its limits. Exit code 77: no chromium.
"""

import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

import chromium

OCTOPAGE, CASES = sys.argv[1], pathlib.Path(sys.argv[2])
LIMIT_SECONDS, LIMIT_BYTES = 10, 5_000_000


def octopage(*args):
    return subprocess.run([OCTOPAGE, *map(str, args)], check=True, capture_output=True, text=True)


def colours_in(png, box):
    """How many pixels of each colour a part of a screenshot has."""
    _, _, lines = chromium.pixels(png)
    x, y, width, height = (int(value) for value in box)
    found = {}
    for line in lines[max(y, 0):y + height]:
        for pixel in line[x:x + width]:
            found[pixel] = found.get(pixel, 0) + 1
    return found


def check_clean(browser, page):
    assert not browser.errors, browser.errors
    own = page.resolve().as_uri()
    others = [url for url in browser.requests if url != own and not url.startswith("data:") and url != "about:blank"]
    assert not others, others
    browser.requests.clear()


def check_drawn(browser, *selectors):
    """Each picture has more than its background."""
    for selector in selectors:
        box = browser.box(selector)
        found = colours_in(browser.screenshot(), box)
        total = sum(found.values())
        assert len(found) >= 3 and max(found.values()) < 0.999 * total, (selector, box, len(found))


def hover(browser, selector, at_x, at_y):
    x, y, width, height = browser.box(selector)
    browser.move(x + width * at_x, y + height * at_y)
    hidden = browser.evaluate("document.getElementById('tip').hidden")
    return "" if hidden else browser.evaluate("document.getElementById('tip').textContent")


def test_case(browser, scratch):
    page = scratch / "case.html"
    octopage("inspect", CASES / "long_context.safetensors", "-o", page, "--json", scratch / "case.json")
    numbers = json.loads((scratch / "case.json").read_text())
    browser.open(page)
    check_clean(browser, page)
    check_drawn(browser, "#map", "#overlap svg", "#unions svg", "#ages svg", "#roofs svg", "#runs svg", "#cache svg")
    text = hover(browser, "#map", 0.001, 0.001)
    assert text.startswith("row 0 ") and "\nregion 0 " in text and "selected" in text, text
    assert "shared with the row before" in hover(browser, "#overlap svg", 0.5, 0.5)
    factor = numbers["sharing"]["union_factors"][1]["factor"]
    text = hover(browser, "#unions svg", 0.125, 0.8)
    assert f"{factor:.3f}" in text, (text, factor)
    assert "entries" in hover(browser, "#ages svg", 0.02, 0.8)
    assert "blocks" in hover(browser, "#cache svg", 0.5, 0.3)
    assert "row by row" in hover(browser, "#roofs svg", 0.12, 0.02)
    assert hover(browser, "h1", 0.5, 0.5) == ""
    rows = browser.evaluate("document.querySelectorAll('#requests tr').length")
    assert rows == 1 + len(numbers["request_table"]), rows


def background(browser):
    return browser.evaluate("getComputedStyle(document.body).backgroundColor")


def test_light_dark_narrow(browser):
    light = background(browser)
    map_light = colours_in(browser.screenshot(), browser.box("#map"))
    browser.prefer("dark")
    dark = background(browser)
    assert light != dark, light
    assert colours_in(browser.screenshot(), browser.box("#map")) != map_light
    browser.evaluate("document.getElementById('theme').click()")
    assert background(browser) == light
    browser.prefer("light")
    browser.evaluate("document.getElementById('theme').click()")
    assert background(browser) == dark
    for width in (320, 380, 760, 1600):
        browser.resize(width, 800)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, width
    browser.resize(1200, 900)


def test_every_case(browser, scratch):
    page = scratch / "each.html"
    for step in sorted(CASES.glob("*.safetensors")):
        octopage("inspect", step, "-o", page)
        browser.open(page)
        check_clean(browser, page)


def hostile_step(source, target):
    """A copy of a step with tensors whose names try to leave the page's text."""
    raw = source.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + length])
    end = len(raw) - 8 - length
    for i, name in enumerate(["</script><script>window.hacked=1</script>", "<img src=x onerror=window.hacked=1>",
                              "<!--<script>", "@DATA@ @SCRIPT@ @STYLE@ \u2028"]):
        header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [end + i, end + i + 1]}
    text = json.dumps(header).encode()
    target.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length:] + b"1234")


def test_hostile(browser, scratch):
    step = scratch / "</script><b>.safetensors".replace("/", "")
    hostile_step(CASES / "invalid_ids_skipped.safetensors", step)
    page = scratch / "hostile.html"
    octopage("inspect", step, "-o", page)
    browser.open(page)
    check_clean(browser, page)
    assert browser.evaluate("window.hacked") is None
    assert browser.evaluate("document.querySelectorAll('img, b:not(.figures b)').length") == 0
    alerts = browser.evaluate("document.getElementById('alerts').innerText")
    assert "12 of 81 entries are not counted" in alerts and "12 with an invalid region" in alerts, alerts
    assert "</script><script>window.hacked=1</script>" in alerts and "@DATA@ @SCRIPT@ @STYLE@" in alerts, alerts
    assert browser.evaluate("getComputedStyle(document.getElementById('alerts')).display") != "none"


def test_small_steps(browser, scratch):
    step, page = scratch / "small.safetensors", scratch / "small.html"
    for flags, alert in ((["--rows", 0], "has no rows"), (["--rows", 1], ""), (["--regions", 0, "--rows", 3], "no valid entry"),
                         (["--rows", 1, "--context", 1], "")):
        octopage("make-step", step, "--dim", 64, *flags)
        octopage("inspect", step, "-o", page, "--png", scratch / "small.png")
        browser.open(page)
        check_clean(browser, page)
        assert alert in browser.evaluate("document.getElementById('alerts').textContent")
        chromium.pixels((scratch / "small.png").read_bytes())


def test_large(browser, scratch):
    step, page = scratch / "large.safetensors", scratch / "large.html"
    octopage("make-step", step, "--rows", 16384, "--context", 131072, "--dim", 64, "--heads", 1)
    start = time.monotonic()
    octopage("inspect", step, "-o", page)
    written = time.monotonic() - start
    drawn = browser.open(page)
    check_clean(browser, page)
    check_drawn(browser, "#map", "#overlap svg")
    size = page.stat().st_size
    print(f"16,384 rows, 131,072 tokens: written in {written:.2f} s, drawn in {drawn:.2f} s, {size} bytes")
    assert written + drawn < LIMIT_SECONDS and size < LIMIT_BYTES


def main():
    if chromium.find() is None:
        print("skipped: chromium is not installed (scripts/install-deps.sh installs it)")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as name, chromium.Browser() as browser:
        scratch = pathlib.Path(name)
        test_case(browser, scratch)
        test_light_dark_narrow(browser)
        test_every_case(browser, scratch)
        test_hostile(browser, scratch)
        test_small_steps(browser, scratch)
        if "--large" in sys.argv:
            test_large(browser, scratch)
    print("ok")


if __name__ == "__main__":
    main()
