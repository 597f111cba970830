"""Chromium by its driver, over WebDriver's plain HTTP: no package is needed beside httpx."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

DRIVER = shutil.which("chromedriver")
KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015"}
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


class Browser:
    """One window."""

    def __init__(self, driver: httpx.Client, folder: Path) -> None:
        options = {"args": [*_ARGUMENTS, f"--user-data-dir={folder}", "--window-size=1400,900"]}
        wanted = {
            "alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        }
        made = driver.post("/session", json={"capabilities": wanted}, timeout=120).json()["value"]
        self._driver, self._path = driver, f"/session/{made['sessionId']}"
        self._folder = folder

    def tell(self, name: str, **given: Any) -> Any:
        """Send a command, and return its value."""
        answer = self._driver.post(f"{self._path}/{name}", json=given, timeout=60).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, address: str) -> None:
        self.tell("url", url=address)

    def run(self, script: str) -> Any:
        return self.tell("execute/sync", script=script, args=[])

    def press(self, key: str) -> None:
        value = KEYS.get(key, key)
        steps = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self.tell("actions", actions=[{"type": "key", "id": "keys", "actions": steps}])

    def wait(self, script: str, wanted: Callable[[Any], bool] = bool, wait_s: float = 30.0) -> Any:
        """Return what `script` returns as soon as it is `wanted`."""
        deadline = time.monotonic() + wait_s
        while not wanted(found := self.run(script)):
            if time.monotonic() > deadline:
                late = self.picture(self._folder.with_name("late.png"))
                raise AssertionError(f"{script}: {found!r}; see {late}")
            time.sleep(0.05)
        return found

    def picture(self, path: Path) -> Path:
        """Write what the window shows."""
        found = self._driver.get(f"{self._path}/screenshot", timeout=60).json()["value"]
        path.write_bytes(base64.b64decode(found))
        return path

    def complaints(self) -> list[str]:
        """Return what the console has: refused content, errors of the script."""
        return [each["message"] for each in self.tell("se/log", type="browser")]

    def close(self) -> None:
        self._driver.delete(self._path, timeout=30)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Yield a window of a browser of its own."""
    process = subprocess.Popen(
        [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        port = next(
            found[1]
            for line in process.stdout
            if (found := re.search(r"started successfully on port (\d+)", line))
        )
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as driver:
            window = Browser(driver, folder)
            try:
                yield window
            finally:
                window.close()
    finally:
        process.terminate()
        process.wait(10)
