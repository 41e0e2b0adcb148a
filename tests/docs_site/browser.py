"""Reads the built site in Chromium, that of QtWebEngine, without a screen; prints a report as JSON.

    python tests/docs_site/browser.py index.html sharding/index.html

It opens each page and waits until it is loaded, then searches from the first one as a reader does.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from pages import SITE
from PyQt6.QtCore import QEventLoop, QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
from PyQt6.QtWidgets import QApplication

WORDS = "FixedShardsPartitioner"
SEARCH = """
    (() => {
        const field = document.querySelector("[data-md-component=search-query]");
        document.querySelector("#__search").click();
        field.focus();
        field.value = WORDS;
        field.dispatchEvent(new Event("input", {bubbles: true}));
        field.dispatchEvent(new Event("keyup", {bubbles: true}));
    })()
"""
RESULTS = """
    JSON.stringify([...document.querySelectorAll(".md-search-result__item a")].map(a => a.href))
"""


class Interceptor(QWebEngineUrlRequestInterceptor):
    """Notes the address of every request."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[str] = []

    def interceptRequest(self, info) -> None:
        self.requested.append(info.requestUrl().toString())


class Page(QWebEnginePage):
    """Notes the warnings and errors of the console."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.console: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        if level != QWebEnginePage.JavaScriptConsoleMessageLevel.InfoMessageLevel:
            self.console.append(f"{source}:{line}: {message}")

    def open(self, url: str) -> bool:
        """Load a page, and what it needs; return whether it could be loaded."""
        loop, loaded = QEventLoop(), []
        self.loadFinished.connect(loaded.append)
        self.loadFinished.connect(loop.quit)
        self.load(QUrl(url))
        loop.exec()
        self.loadFinished.disconnect()
        return loaded == [True]

    def run(self, script: str):
        """Return what a script gives in this page."""
        loop, result = QEventLoop(), []
        self.runJavaScript(script, lambda value: (result.append(value), loop.quit()))
        loop.exec()
        return result[0]

    def search(self, words: str) -> list[str]:
        """Return the addresses of what the search box finds, when it has found something."""
        self.run(SEARCH.replace("WORDS", json.dumps(words)))
        while not (found := json.loads(self.run(RESULTS))):
            wait(0.1)
        return found


def wait(seconds: float) -> None:
    """Let the browser work."""
    loop = QEventLoop()
    QTimer.singleShot(int(1000 * seconds), loop.quit)
    loop.exec()


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, and notes what it does not have."""

    failed: list[str]

    def __init__(self, *args, failed: list[str], **kwargs) -> None:
        self.failed = failed
        super().__init__(*args, directory=str(SITE), **kwargs)

    def log_request(self, code="-", size="-") -> None:
        if int(code) >= 400:
            self.failed.append(f"{int(code)} {self.path}")

    def log_message(self, *args) -> None:
        pass


def main(paths: list[str]) -> None:
    """Open the pages, search, and print the report."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")
    failed: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, failed=failed))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"http://127.0.0.1:{server.server_port}/"

    app = QApplication(sys.argv[:1])
    profile, interceptor = QWebEngineProfile(), Interceptor()
    profile.setUrlRequestInterceptor(interceptor)
    page = Page(profile)
    opened = [path for path in paths if page.open(host + path)]
    page.open(host)
    found = page.search(WORDS)
    page.open(next((url for url in found if url.endswith(f"#kerasps.{WORDS}")), found[0]))
    report = {
        "browser": page.run("navigator.userAgent"),
        "opened": opened,
        "found": [url.removeprefix(host) for url in found],
        "heading": page.run("document.querySelector(':target')?.textContent"),
        "console": page.console,
        "failed": failed,
        "foreign": [
            url
            for url in interceptor.requested
            if not url.startswith((host, "data:", "blob:", "about:"))
        ],
        "requests": len(interceptor.requested),
    }
    print("REPORT", json.dumps(report), flush=True)
    # Qt may crash while Python takes its objects apart.
    app.processEvents()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
