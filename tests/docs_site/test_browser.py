"""The built site in Chromium: no error on any page, and the search box finds a class."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs_site.pages import site_pages


@pytest.fixture(scope="module")
def report():
    try:
        importlib.import_module("PyQt6.QtWebEngineWidgets")
    except ImportError as exc:  # the package, or a library of the system that it needs
        pytest.skip(f"Chromium cannot be started here: {exc}")
    paths = [path for path in site_pages() if path != "404.html"]
    script = Path(__file__).with_name("browser.py")
    done = subprocess.run(
        [sys.executable, str(script), *paths], capture_output=True, text=True, timeout=240
    )
    reports = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert reports, f"exit code {done.returncode}:\n{done.stderr[-3000:]}"
    return json.loads(reports[0].removeprefix("REPORT ")) | {"paths": paths}


def test_chromium_opens_every_page(report):
    assert "Chrome/" in report["browser"]
    assert report["opened"] == report["paths"]
    assert report["requests"] > len(report["paths"])


def test_the_console_has_no_error(report):
    assert report["console"] == []


def test_no_request_fails_or_leaves_the_site(report):
    assert report["failed"] == []
    assert report["foreign"] == []


def test_the_search_box_finds_a_class_and_leads_to_it(report):
    assert report["found"][0].startswith("api/variables/")
    assert report["heading"].strip().startswith("kerasps.FixedShardsPartitioner")
