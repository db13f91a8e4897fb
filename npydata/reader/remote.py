"""A file behind a URL, read by ranges: HTTP by the standard library, other schemes by fsspec.

Small reads go through a cache of blocks, so that headers and directories take few requests; large
ones go straight to where they belong.
"""

import re
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import lru_cache
from http.client import HTTPException
from urllib.parse import urljoin, urlsplit

from npydata.reader.file import File, FormatError

BLOCK_BYTES, BLOCKS = 1 << 16, 64
"""What a small read fetches, and how many blocks are kept."""
TIMEOUT_S = 30.0
Version = tuple[int, str | None]
"""The size of a file, and what else changes with it, if the server says so."""
Fetch = Callable[[str, int, int], tuple[bytes, Version]]
"""Returns bytes of a URL from an offset on, fewer at its end."""
URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def is_url(path: object) -> bool:
    """Whether a path is the URL of a file."""
    return isinstance(path, str) and URL.match(path) is not None


class RemoteFile(File):
    """A file behind a URL; its bytes are fetched when they are asked for.

    It is never mapped: ``map`` copies. That it is unchanged shows with every answer.
    """

    is_remote = True

    def __init__(self, url: str) -> None:
        if "::" in url:
            raise FormatError("a chained URL, expected the URL of one file")
        self.path = self.identity = url
        self.fetched = 0
        """Bytes of the file that were fetched."""
        http = urlsplit(url).scheme.lower() in ("http", "https")
        self._fetch: Fetch | None = fetch_by_http if http else fetch_by_driver
        self._version: Version | None = None
        self._block = lru_cache(BLOCKS)(lambda k: self._fetched(k * BLOCK_BYTES, BLOCK_BYTES))
        self._block(0)  # an answer gives the size

    def _fetched(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file, fewer at its end; every answer must be of the same file."""
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
        """Let go of what was fetched; later reads raise."""
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
        """Open the file of another name beside it."""
        query = urlsplit(self.path).query
        return RemoteFile(urljoin(self.path, name) + (f"?{query}" if query else ""))


def fetch_by_http(url: str, offset: int, nbytes: int) -> tuple[bytes, Version]:
    """Fetch a range of a URL by HTTP. ``urllib`` follows a few redirects, and none to ``file:``."""
    ask = {"Range": f"bytes={offset}-{offset + nbytes - 1}", "Accept-Encoding": "identity"}
    try:
        request = urllib.request.Request(url, headers=ask)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
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
    except urllib.error.HTTPError as error:
        raise FormatError(f"the server answers {error.code} {error.reason!s:.80}") from None
    except (OSError, ValueError, HTTPException) as error:  # no such host, a time-out, no URL
        raise FormatError(f"can't be fetched: {error!s:.200}") from None


def fetch_by_driver(url: str, offset: int, nbytes: int) -> tuple[bytes, Version]:
    """Fetch a range of a URL by the driver that fsspec has for its scheme."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        driver, path = url_to_fs(url)
        found: bytes = driver.cat_file(path, offset, offset + nbytes)
        return found, (int(driver.info(path)["size"]), None)
    except Exception as error:  # no fsspec, or no driver in it; or what the driver raises
        raise FormatError(f"can't be read: {type(error).__name__} {error!s:.200}") from None
