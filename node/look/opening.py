"""A browser is sent to the page without the token on its command line, which every user of the
machine can read (`ps`): it is given a file that only its owner can read, which leads there.
"""

from __future__ import annotations

import contextlib
import html
import secrets
import time
import webbrowser
from pathlib import Path

from ..home.paths import make_private, open_private

PATTERN = "page-*.html"
LEFT_S = 600.0
"""A file of a page that was killed is removed by the next one, once it is so old: any younger one
may be another page's, whose browser is still starting."""
PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>atoll</title>
<p><a href="{address}">The run as a page</a></p>
"""


class Leading:
    """The file, in a folder of the user's."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PATTERN.replace("*", secrets.token_hex(8))

    def show(self, address: str) -> None:
        """Show a page in the user's browser. Raises ConfigError or StorageError for a folder that
        cannot be used, OSError where the file cannot be written.
        """
        make_private(self._path.parent)
        for path in self._path.parent.glob(PATTERN):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > LEFT_S:
                    path.unlink()
        with open_private(self._path) as file:
            file.write(PAGE.format(address=html.escape(address)).encode())
        webbrowser.open(self._path.absolute().as_uri())

    def remove(self) -> None:
        """The browser is there, or nobody needs it any more. Idempotent."""
        with contextlib.suppress(OSError):
            self._path.unlink()
