"""A headless Chromium that a test drives through its own protocol over two pipes: no package is needed.

https://chromedevtools.github.io/devtools-protocol. Messages are JSON that ends with a zero byte.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PROGRAM = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
WAIT_S = 120
OPTIONS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --remote-debugging-pipe"
# The browser reads commands from its descriptor 3 and writes to 4.
SHELL = 'exec "$@" 3<&"$READ" 4>&"$WRITE"'


class Browser:
    """One page of a browser.

    Attributes:
        requests: the addresses that the page has asked for.
        complaints: errors and warnings of its console, and exceptions.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._held, self._count = to_browser, from_browser, b"", 0
        self.requests, self.complaints = list[str](), list[str]()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the result of a command to the page."""
        return self._call(method, self._session, **params)

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def go(self, url: str) -> None:
        """Opens an address, and waits until all of it is there."""
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState == 'complete' && location.href == {json.dumps(url)}")

    def wait(self, script: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + WAIT_S
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"{script} does not come: {self.run('document.body.innerText')} {self.complaints}"
            time.sleep(0.05)

    def size(self, width: int, height: int, *, scheme: str = "light") -> None:
        """Sets the size of the window, and its colours: light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.call("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value=scheme)])

    def press(self, key: str, **more: Any) -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def type(self, text: str) -> None:
        """Writes text where the focus is."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str, *, at: tuple[float, float] = (0.5, 0.5)) -> None:
        """Clicks on an element, at a part of its width and height."""
        script = f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'nearest'}}); "
        box = self.run(script + "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()")
        place = dict(x=box[0] + at[0] * box[2], y=box[1] + at[1] * box[3], button="left", clickCount=1)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place)

    def close(self) -> None:
        """Ends the browser, with all its processes."""
        self._call("Browser.close")

    def picture(self, path: Path) -> None:
        """Writes what the window shows."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = dict(id=self._count, method=method, params=params) | (dict(sessionId=session) if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._see(answer.get("method"), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._from], [], [], WAIT_S)
            assert ready, "the browser does not answer"
            part = os.read(self._from, 2**20)
            assert part, "the browser has ended"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _see(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Runs a browser until the block ends, with its files in `folder`."""
    (read, to_browser), (from_browser, write) = os.pipe(), os.pipe()
    command = ["bash", "-c", SHELL, "bash", PROGRAM, *OPTIONS.split(), f"--user-data-dir={folder}"]
    environment = os.environ | dict(READ=str(read), WRITE=str(write), HOME=str(folder))
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, pass_fds=(read, write), env=environment, stdout=log, stderr=log)
    os.close(read), os.close(write)
    try:
        page = Browser(to_browser, from_browser)
        yield page
        page.close()
        process.wait(WAIT_S)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser), os.close(from_browser)
