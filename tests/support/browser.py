"""A real browser without a screen: opens a file, and tells what was drawn, what was asked for and what went wrong.

Speaks Chromium's DevTools protocol over aiohttp, which Ray brings along.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)


@dataclass
class Seen:
    """What happened while a page was open."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    picture: bytes = b""


def look(
    file: Path,
    questions: dict[str, str],
    *,
    ready: str = "document.readyState === 'complete'",
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    picture: bool = False,
    seconds: float = 60.0,
) -> Seen:
    """Open `file`, wait until `ready` is true, and answer `questions` (JavaScript expressions)."""
    return asyncio.run(_look(file, questions, ready, width, height, dark, picture, seconds))


async def _look(file: Path, questions: dict[str, str], ready: str, width: int, height: int, dark: bool, picture: bool,
                seconds: float) -> Seen:  # fmt: skip
    seen = Seen()
    async with _page(seen) as ask:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await ask(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await ask("Emulation.setDeviceMetricsOverride", **metrics)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await ask("Emulation.setEmulatedMedia", features=[theme])
        await ask("Page.navigate", url=file.resolve().as_uri())
        deadline = asyncio.get_running_loop().time() + seconds
        while not (await _value(ask, ready)):
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"{file} was not ready: {seen.errors}")
            await asyncio.sleep(0.05)
        for name, expression in questions.items():
            seen.answers[name] = await _value(ask, expression)
        if picture:
            shot = await ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
            seen.picture = base64.b64decode(shot["data"])
    return seen


async def _value(ask: Any, expression: str) -> Any:
    found = await ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
    return found["result"].get("value")


@asynccontextmanager
async def _page(seen: Seen) -> AsyncIterator[Any]:
    """A function that sends a command to a fresh tab and returns its answer."""
    assert CHROMIUM is not None, "expected chromium on this machine: apt install chromium"
    with tempfile.TemporaryDirectory(prefix="archipelago-browser-", ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                   f"--user-data-dir={folder}", "--no-first-run", "--disable-background-networking",
                   "--disable-component-update", "--hide-scrollbars", "about:blank"]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(folder) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
                async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield _Talk(socket, seen).ask
        finally:
            process.terminate()
            process.wait(20)


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    for _ in range(600):
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        if process.poll() is not None:
            raise RuntimeError(f"the browser ended with exit code {process.returncode}")
        await asyncio.sleep(0.05)
    raise TimeoutError("the browser did not open its port")


class _Talk:
    def __init__(self, socket: Any, seen: Seen) -> None:
        self.socket, self.seen, self.numbers = socket, seen, itertools.count(1)

    async def ask(self, method: str, **parameters: Any) -> Any:
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self.socket.receive_json()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        content = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            self.seen.requests.append(content["request"]["url"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.seen.errors.append(str(content["exceptionDetails"].get("exception", content)))
        elif message["method"] == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.seen.errors.append(content["entry"]["text"])
        elif message["method"] == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning"):
            self.seen.errors.append(str(content["args"]))
