"""HTML pages in a browser: the gallery and the report of the studies (`make test-browser`)."""

import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from inference import gallery

REPORT = pathlib.Path(__file__).resolve().parents[1] / "docs/tables/small/report.html"


@pytest.fixture(scope="module")
def browser():
    """Yields Debian's Chromium without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Writes a gallery of 60 images with long names, in three classes."""
    folder, random = tmp_path_factory.mktemp("gallery"), np.random.default_rng(0)
    vectors, paths = random.normal(size=[60, 16]).astype(np.float32), []
    for number in range(60):
        paths.append(str(folder / f"{'long_name' * 9}{number}.png"))
        Image.fromarray(random.integers(0, 256, [20, 30, 3], np.uint8)).save(paths[-1])
    names = [pathlib.Path(path).name for path in paths]
    classes = [f"class {number % 3}" for number in range(60)]
    images = gallery.Images(paths, names, vectors, classes, {"broken.png": "truncated"})
    gallery.write_page(images, "runs/model", str(folder / "gallery.html"))
    return folder / "gallery.html"


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("name", ["gallery", "report"])
def test_pages_open_from_disk_without_errors_and_fit_the_window(name, width, browser, page):
    # The window cannot be narrower than 500 pixels, but the emulated device can.
    size = dict(width=width, height=800, deviceScaleFactor=1, mobile=False)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get((page if name == "gallery" else REPORT).as_uri())
    assert browser.execute_script("return window.innerWidth") == width
    assert browser.get_log("browser") == []
    sizes = browser.execute_script(
        "return Array.from(document.images, image => [image.naturalWidth, image.width])"
    )
    assert sizes and all(min(size) > 0 for size in sizes)
    widths = "return [document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert max(browser.execute_script(widths)) <= width


def test_the_map_shows_the_image_at_the_mouse(browser, page):
    browser.get(page.as_uri())
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    for circle in browser.find_elements(By.CSS_SELECTOR, "circle")[:2]:
        ActionChains(browser).scroll_to_element(circle).move_to_element(circle).perform()
        assert tip.is_displayed() and tip.find_element(By.TAG_NAME, "img").is_displayed()
        assert circle.get_attribute("class").endswith("near")
    assert len(browser.find_elements(By.CSS_SELECTOR, "circle.near")) == 1
