"""The page of `recshard serve` in Chromium: example, answer, pictures, themes, a narrow window, axe-core."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from recshard_lab.serving.server import serve
from tests.browser.axe import faint_words, findings
from tests.browser.lab_server import chromium
from tests.patience import scaled
from tests.serving.server.stub import LOADER, write

pytestmark = pytest.mark.browser


def test_the_page_shows_the_model_and_answers_a_request_in_both_themes_and_widths(tmp_path: Path) -> None:
    write(tmp_path, "v1")
    with (
        serve(tmp_path, token="s3cret", loader=LOADER, watch_s=0, drain_s=0) as server,
        chromium() as browser,
    ):
        for scheme, width in (("light", 1200), ("dark", 400)):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            problems: list[str] = []
            page.on("pageerror", lambda error, found=problems: found.append(str(error)))
            page.goto(server.address)
            page.get_by_label("Bearer token").fill("s3cret")
            expect(page.locator("#state")).to_have_text("ready", timeout=1000 * scaled(30))
            expect(page.locator("#inputs tr")).to_have_count(5)
            expect(page.locator("#inputs tr").first).to_have_text("moviesparseids 0 to 999")
            expect(page.locator("#counts")).to_have_text("2 sparse features, 2 dense columns, 1 output")
            page.get_by_role("button", name="Send").click()
            expect(page.locator("#answer")).to_contain_text("probability", timeout=1000 * scaled(30))
            page.locator("#body").fill('{"sparse": {}}')
            page.get_by_role("button", name="Send").click()
            expect(page.locator("#answer")).to_contain_text("Fix: ", timeout=1000 * scaled(30))
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert findings(page, "body") == []
            assert faint_words(page, "body") == []
            assert problems == []
            page.close()
