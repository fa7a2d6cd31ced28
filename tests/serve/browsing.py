"""A page in a real browser: opened, looked at, kept as a picture."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, BrowserContext, Error, Page, Route, expect  # noqa: E402

from tests.axe import violations  # noqa: E402

__all__ = ["Browser", "BrowserContext", "Error", "Page", "Route", "expect"]
SHOTS = os.environ.get("HERON_SCREENSHOTS")  # a folder to keep pictures of the page in


def opened(context: BrowserContext, address: str) -> Page:
    page = context.new_page()
    page.goto(address)
    return page


def keys(page: Page) -> list[str]:
    """The keys of the results, once they are there."""
    expect(page.locator("#hits")).not_to_have_attribute("aria-busy", "true")
    expect(page.locator("#hits a").first).to_be_visible()
    found = page.locator("#hits a b").all_text_contents()
    return found or page.locator("#hits a").all_text_contents()


def shoot(page: Page, name: str) -> None:
    """Checks by axe-core what is shown, and keeps a picture of it."""
    page.wait_for_timeout(300)  # for what moves
    assert violations(page) == [], name
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def focused(page: Page) -> str:
    """What has the focus: its id, or its text."""
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))


def contrast(page: Page, text: str, behind: str) -> float:
    """WCAG's ratio of the luminances of a text and of what is behind it."""
    style = "element => getComputedStyle(element)"
    colours = (
        page.locator(text).first.evaluate(f"{style}.color"),
        page.locator(behind).first.evaluate(f"{style}.backgroundColor"),
    )
    light = []
    for colour in colours:
        parts = np.array([float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        light.append(float(linear @ np.array([0.2126, 0.7152, 0.0722])))
    return (max(light) + 0.05) / (min(light) + 0.05)
