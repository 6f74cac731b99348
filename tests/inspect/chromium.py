"""Drives Debian's chromium without a window, over a pipe, with the standard library alone."""

import base64
import json
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import time
import zlib


def find():
    return shutil.which("chromium")


class Browser:
    """One page of a browser of its own. Collects console errors, exceptions and requested addresses."""

    def __init__(self, width=1200, height=900):
        self.scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_end, self.writer = os.pipe()
        self.reader, write_end = os.pipe()

        def connect():  # the browser reads commands from 3 and writes answers to 4
            a, b = os.dup(read_end), os.dup(write_end)
            os.dup2(a, 3)
            os.dup2(b, 4)

        flags = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars",
                 "--disable-dev-shm-usage", f"--user-data-dir={self.scratch.name}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        self.process = subprocess.Popen([find(), *flags], preexec_fn=connect, close_fds=False, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read_end)
        os.close(write_end)
        self.buffer, self.count, self.session = b"", 0, None
        self.errors, self.requests, self.loaded = [], [], False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.session = None
            self.call("Browser.close")
        except (OSError, RuntimeError):
            self.process.kill()
        self.process.wait(20)
        os.close(self.reader)
        os.close(self.writer)
        self.scratch.cleanup()

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _receive(self):
        while b"\0" not in self.buffer:
            part = os.read(self.reader, 1 << 20)
            if not part:
                raise RuntimeError("the browser is gone")
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:600])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, path):
        """Opens a file; returns the seconds until it says that it is drawn."""
        start = time.monotonic()
        self.loaded = False
        self.call("Page.navigate", url=pathlib.Path(path).resolve().as_uri())
        while not self.loaded:
            self._note(self._receive())
        while self.evaluate("document.documentElement.dataset.drawn") != "yes":
            if time.monotonic() - start > 120 or self.errors:
                raise RuntimeError(f"the page was not drawn: {self.errors}")
            time.sleep(0.05)
        return time.monotonic() - start

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:600])
        return result["result"].get("value")

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def box(self, selector):
        """(x, y, width, height) of an element in the window, scrolled into it."""
        return self.evaluate(f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
                             "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
                             "return [b.x, b.y, b.width, b.height]; })()")

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, whole=False):
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def whole_page(self):
        """A screenshot of everything, from the top."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                                          clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})["data"])


def pixels(png):
    """(width, height, rows of (r, g, b)) of an 8-bit PNG without interlacing."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, packed, header = 8, b"", None
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place:place + 8])
        body = png[place + 8:place + 8 + length]
        header = struct.unpack(">IIBBBBB", body) if kind == b"IHDR" else header
        packed += body if kind == b"IDAT" else b""
        place += 12 + length
    width, height, depth, colour, _, _, interlace = header
    channels = {2: 3, 6: 4}[colour]
    assert depth == 8 and interlace == 0
    raw, stride = zlib.decompress(packed), width * channels
    before, lines = bytearray(stride), []
    for y in range(height):
        kind, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
        for i in range(stride):
            left = line[i - channels] if i >= channels else 0
            up, corner = before[i], before[i - channels] if i >= channels else 0
            if kind == 1:
                line[i] = (line[i] + left) & 255
            elif kind == 2:
                line[i] = (line[i] + up) & 255
            elif kind == 3:
                line[i] = (line[i] + (left + up) // 2) & 255
            elif kind == 4:
                guess = left + up - corner
                distances = (abs(guess - left), abs(guess - up), abs(guess - corner))
                line[i] = (line[i] + (left, up, corner)[distances.index(min(distances))]) & 255
        before = line
        lines.append([tuple(line[x * channels:x * channels + 3]) for x in range(width)])
    return width, height, lines
