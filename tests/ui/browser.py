"""A headless Chromium driven over its debugging pipe: null-terminated JSON on two file descriptors, nothing else."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import tempfile
from pathlib import Path
from time import monotonic

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9, "Enter": 13, " ": 32, "End": 35}


def found() -> str | None:
    """The Chromium of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. ``messages`` are what its console and its policy complained about."""

    def __init__(self, seconds: float = 180.0):
        self.ends = monotonic() + seconds
        self.folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        ask, self.asking = os.pipe()
        self.answers, answer = os.pipe()
        far = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ask, answer)]  # clear of the numbers they are put on
        program = found() or ""
        self.process = os.posix_spawn(
            program,
            [program, *FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"],
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)),
                (os.POSIX_SPAWN_DUP2, far[0], 3),
                (os.POSIX_SPAWN_DUP2, far[1], 4),
            ],
        )
        for end in (ask, answer, *far):
            os.close(end)
        self.numbers, self.rest, self.messages = itertools.count(1), b"", []
        self.loads = 0
        targets = self.call("Target.getTargets", session=None)["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.asking)
        os.close(self.answers)
        self.folder.cleanup()

    def call(self, method: str, params: dict | None = None, session: str | None = "") -> dict:
        """The result of one command."""
        number = next(self.numbers)
        said = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            said["sessionId"] = session or self.session
        os.write(self.asking, json.dumps(said).encode() + b"\0")
        while True:
            heard = self._next()
            if heard.get("id") == number:
                assert "error" not in heard, (method, heard["error"])
                return heard["result"]

    def _next(self) -> dict:
        while b"\0" not in self.rest:
            assert select.select([self.answers], [], [], max(0.0, self.ends - monotonic()))[0], "the browser is silent"
            more = os.read(self.answers, 1 << 20)
            assert more, "the browser has ended"
            self.rest += more
        first, _, self.rest = self.rest.partition(b"\0")
        heard = json.loads(first)
        self.loads += heard.get("method") == "Page.loadEventFired"
        if heard.get("method") == "Log.entryAdded" and heard["params"]["entry"]["level"] == "error":
            self.messages.append(heard["params"]["entry"]["text"])
        if heard.get("method") == "Runtime.exceptionThrown":
            self.messages.append(heard["params"]["exceptionDetails"].get("exception", {}).get("description", "?"))
        return heard

    def open(self, url: str, width: int, height: int, *, dark: bool = False, calm: bool = True) -> None:
        """Load a page at a size, in a theme of the system."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        features += [{"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"}]
        self.call("Emulation.setEmulatedMedia", {"features": features})
        for place in ("about:blank", url):  # so that an address that differs behind its # is loaded too
            self.loads = 0
            self.call("Page.navigate", {"url": place})
            while not self.loads:
                self._next()

    def run(self, script: str):
        """The value of an expression in the page."""
        said = {"expression": script, "returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", said)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        while not self.run(f"(() => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }})()"):
            assert monotonic() < self.ends, f"never true: {script}"
            select.select([], [], [], 0.03)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key where the focus is."""
        said = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS.get(key, 0), "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown" if text else "rawKeyDown", **said, **text})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **said})

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", {"text": text})

    def picture(self, path: str | Path, *, whole: bool = False) -> None:
        """The page as a PNG."""
        data = self.call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})["data"]
        Path(path).write_bytes(base64.b64decode(data))
