"""Debian's Chromium without a network: what every browser test shares."""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]

SLOWEST = 180_000  # ms; a page of 5 MB takes a second, unless the machine has much else to do


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that finds no host but this machine."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        yield browser
        browser.close()


class Seen:
    """A page that is open, with what its console said and what it asked the network for."""

    def __init__(self, browser: Browser, width: int, height: int = 900):
        self.page: Page = browser.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(SLOWEST)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(f"{m.text} {m.location['url']}") if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None)
