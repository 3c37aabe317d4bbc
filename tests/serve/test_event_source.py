"""A web page in Chromium reads a stream by its own `EventSource`, if its origin is allowed, and else nothing at all."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from mlxcel_nb.serve.served import Served
from mlxcel_nb.serve.server import ApiServer
from tests.browser.page import chromium_browser

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

READ = """
async ([server, body]) => {
  const asked = await fetch(server + "/v1/events", {
    method: "POST",
    headers: {"content-type": "application/json"},
    body: JSON.stringify({url: "/v1/completions", body}),
  });
  const source = new EventSource(server + (await asked.json()).url);
  const pieces = [];
  return await new Promise((resolve, reject) => {
    source.onerror = () => reject(new Error("the stream failed"));
    source.onmessage = ({data}) => {
      if (data !== "[DONE]") return pieces.push(JSON.parse(data));
      source.close();
      resolve(pieces);
    };
  });
}
"""
GONE = """
url => new Promise(resolve => {
  const source = new EventSource(url);
  source.onerror = () => resolve(source.readyState === EventSource.CLOSED);
})
"""
BODY = {"prompt": "x", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright, chromium_browser(playwright, chromium) as browser:
        yield browser


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Where an empty page comes from."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>A page</title><link rel=icon href=data:,>")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as pages:
        thread = threading.Thread(target=pages.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{pages.server_address[1]}"
        pages.shutdown()
        thread.join(10)


@pytest.fixture
def page(browser: Browser, origin: str) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(origin)
    yield page
    page.close()


def test_a_page_that_is_allowed_reads_its_stream_to_the_end(tiny_server: ApiServer, page: Page, origin: str) -> None:
    with ApiServer(Served(tiny_server.served.cluster), port=0, origins=[origin]) as server:
        pieces = page.evaluate(READ, [server.url, BODY])
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
        assert "".join(piece["choices"][0]["text"] for piece in pieces)
        assert page.evaluate(GONE, f"{server.url}/v1/events/used"), "it does not come again for what is gone"


def test_a_page_from_elsewhere_gets_nothing(tiny_server: ApiServer, page: Page) -> None:
    """Case 66: nor does a request of its own reach the engines."""
    before = tiny_server._api.metrics.page()
    failed = "([url, body]) => fetch(url, {method: 'POST', mode: 'no-cors', body}).then(r => r.type)"
    assert page.evaluate(failed, [f"{tiny_server.url}/v1/completions", json.dumps(BODY)]) == "opaque"
    with pytest.raises(Exception, match="Failed to fetch"):
        page.evaluate("url => fetch(url).then(r => r.text())", f"{tiny_server.url}/v1/models")
    after = tiny_server._api.metrics.page()
    assert b'status="403"' in after and b"mlxcel_answers_total{" not in before + after
