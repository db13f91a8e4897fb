"""A file at a URL, read by byte range: HTTP by the standard library, other schemes by fsspec.

Small reads go through a cache of blocks, so that headers and directories take few requests; large
ones go straight to their destination.
"""

import re
import urllib.request
from collections.abc import Callable
from functools import lru_cache
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urlsplit

from npydata.reader.file import File, FormatError

BLOCK_BYTES, BLOCKS = 1 << 16, 64
"""How much a small read fetches, and how many blocks are kept."""
TIMEOUT_S = 30.0
Version = tuple[int, str | None]
"""The size of a file, and its ETag or modification time if the server sends one."""
Fetch = Callable[[str, int, int], tuple[bytes, Version]]
"""Returns bytes of a URL from an offset on, fewer at the file's end, and its version."""
URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def is_url(path: object) -> bool:
    """Whether a path is the URL of a file."""
    return isinstance(path, str) and URL.match(path) is not None


class RemoteFile(File):
    """A file at a URL; its bytes are fetched on demand.

    It is never mapped: ``map`` copies. Every response is checked to be of the same version.
    """

    is_remote = True

    def __init__(self, url: str) -> None:
        if "::" in url:
            raise FormatError("a chained URL, expected the URL of one file")
        self.path = self.identity = url
        self.fetched = 0
        """Bytes fetched so far."""
        http = urlsplit(url).scheme.lower() in ("http", "https")
        self._fetch: Fetch | None = fetch_by_http if http else fetch_by_driver
        self._version: Version | None = None
        self._block = lru_cache(BLOCKS)(lambda k: self._fetched(k * BLOCK_BYTES, BLOCK_BYTES))
        self._block(0)  # the response gives the size

    def _fetched(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file, fewer at its end; every response must be of one version."""
        if self._fetch is None:
            raise FormatError("the checkpoint is closed")
        found, version = self._fetch(self.path, offset, nbytes)
        if self._version not in (None, version):
            raise FormatError("was changed on the server since: open it again")
        self._version, self.size = version, version[0]
        self.fetched += len(found)
        if len(found) != min(nbytes, self.size - offset):
            raise FormatError(f"the server sent {len(found):,} bytes of {nbytes:,}")
        return found

    def close(self) -> None:
        """Drop the cached blocks; later reads raise."""
        self._block.cache_clear()
        self._fetch = None

    def _fill(self, view: memoryview, offset: int) -> None:
        if view.nbytes >= BLOCK_BYTES:
            view[:] = self._fetched(offset, view.nbytes)
            return
        blocks = range(offset // BLOCK_BYTES, -(-(offset + view.nbytes) // BLOCK_BYTES))
        content = b"".join(self._block(number) for number in blocks)
        view[:] = content[offset % BLOCK_BYTES :][: view.nbytes]

    def sibling(self, name: str) -> "RemoteFile":
        """Open the file called ``name`` beside this one."""
        name = quote(name) if self._fetch is fetch_by_http else name
        here, mark, query = self.path.partition("?")
        return RemoteFile(f"{here.rpartition('/')[0]}/{name}{mark}{query}")


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects without reading what comes with them, which may have no end."""

    def redirect_request(self, request: Any, answer: Any, *said: Any) -> Any:  # noqa: D102
        answer.close()
        return super().redirect_request(request, answer, *said)


OPENER = urllib.request.build_opener(Redirects)


def fetch_by_http(url: str, offset: int, nbytes: int) -> tuple[bytes, Version]:
    """Fetch a range of a URL by HTTP. ``urllib`` follows a few redirects, and none to ``file:``."""
    ask = {"Range": f"bytes={offset}-{offset + nbytes - 1}", "Accept-Encoding": "identity"}
    try:
        request = urllib.request.Request(url, headers=ask)
        with OPENER.open(request, timeout=TIMEOUT_S) as answer:
            if urlsplit(url).scheme == "https" != urlsplit(answer.url).scheme:
                raise FormatError("is redirected away from https, which is not followed")
            if answer.status != 206:
                raise FormatError("the server sends whole files only (no Range): download it")
            said, tag = answer.headers.get("Content-Range", ""), answer.headers.get("ETag")
            place = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", said)
            if place is None or int(place[1]) != offset:
                raise FormatError(f"the server answers with the range {said!r:.80}")
            version = int(place[2]), tag or answer.headers.get("Last-Modified")
            return answer.read(nbytes + 1)[:nbytes], version
    except (OSError, ValueError, HTTPException) as error:  # no such file or host, a timeout
        raise FormatError(f"can't be fetched: {error!s:.200}") from None


def fetch_by_driver(url: str, offset: int, nbytes: int) -> tuple[bytes, Version]:
    """Fetch a range of a URL with fsspec's driver for its scheme."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        driver, path = url_to_fs(url)
        found: bytes = driver.cat_file(path, offset, offset + nbytes)
        return found, (int(driver.info(path)["size"]), None)
    except Exception as error:  # no fsspec, no driver for the scheme, or what the driver raises
        raise FormatError(f"can't be read: {type(error).__name__} {error!s:.200}") from None
