"""A URL is a path: only what is needed is fetched, and the server is counted on for nothing."""

import http.server
import json
import threading
from contextlib import suppress
from urllib.parse import unquote

import pytest
import torch
from safetensors.torch import save_file

from npydata import CheckpointError, open_checkpoint
from npydata.reader.inspect import as_table, inspect_checkpoint


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder by ranges, and counts; ``odd`` says what it does wrong."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.requests, self.sent, self.odd, self.tag = folder, 0, 0, "", "one"

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        server = self.server
        server.requests += 1
        name = unquote(self.path.strip("/").split("?")[0])
        targets = {
            "redirects": server.url(name),
            "another scheme": f"file://{server.folder}/{name}",
        }
        if server.odd in targets:
            self.send_response(302)
            self.send_header("Location", targets[server.odd])
            self.end_headers()
            with suppress(OSError):  # the client does not read all this
                for _ in range(100):
                    server.sent += self.wfile.write(bytes(1 << 20))
            return
        path = server.folder / name
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        begin, end = (int(one) for one in self.headers["Range"][6:].split("-"))
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(min(end, size - 1) - begin + 1)
        if server.odd == "cut short" and begin:
            content = content[:-1]
        server.sent += len(content)
        self.send_response(200 if server.odd == "no ranges" else 206)
        self.send_header("ETag", server.tag)
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(content) - 1}/{size}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def written(folder, kind, count, numel):
    """A checkpoint of so many tensors, and the name of the file to open."""
    state = {f"layers.{k}.w": torch.full((numel,), float(k)) for k in range(count)}
    if kind == "safetensors":
        save_file(state, folder / "a.safetensors")
        return "a.safetensors"
    if kind == "sharded":
        for k, (name, one) in enumerate(state.items()):
            save_file({name: one}, folder / f"s {k}.safetensors")
        where = {name: f"s {k}.safetensors" for k, name in enumerate(state)}
        (folder / "a.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return "a.safetensors.index.json"
    torch.save(state, folder / "a.pt", _use_new_zipfile_serialization=kind == "zip")
    return "a.pt"


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "sharded"])
def test_a_remote_checkpoint_reads_as_a_local_one(server, tmp_path, kind):
    name = written(tmp_path, kind, 3, 40_000)
    with open_checkpoint(server.url(name)) as remote, open_checkpoint(tmp_path / name) as local:
        assert list(remote) == list(local)
        loaded = remote.load()
        for one in local:
            assert torch.equal(remote[one], local[one])
            assert torch.equal(loaded[one], local[one])
            assert torch.equal(remote.get_slice(one)[7:9], local[one][7:9])


@pytest.mark.parametrize("kind, requests", [("zip", 8), ("safetensors", 8), ("legacy", 40)])
@pytest.mark.parametrize("mebibytes", [64, pytest.param(2048, marks=pytest.mark.nightly)])
def test_one_tensor_takes_few_requests_and_few_bytes(server, tmp_path, kind, requests, mebibytes):
    numel = 1 << 22
    name = written(tmp_path, kind, mebibytes // 16, numel)
    with open_checkpoint(server.url(name)) as checkpoint:
        last = list(checkpoint)[-1]
        assert torch.equal(checkpoint[last], torch.full((numel,), float(last.split(".")[1])))
    assert server.requests <= requests
    assert server.sent <= 17.5 * 2**20


def test_a_conversion_asks_for_large_pieces(server, tmp_path):
    with open_checkpoint(server.url(written(tmp_path, "safetensors", 1, 1 << 24))) as checkpoint:
        checkpoint.to_safetensors(tmp_path / "b.safetensors")
    assert server.requests <= 8


def test_inspecting_a_url_says_how_little_was_read(server, tmp_path):
    report = inspect_checkpoint(server.url(written(tmp_path, "zip", 16, 1 << 20)))
    assert len(report["tensors"]) == 16
    assert report["fetched_bytes"] == server.sent < 300_000
    assert [*as_table(report)][-1].startswith("read ")


@pytest.mark.parametrize("odd, message", [
    ("no ranges", "whole files only"), ("redirects", "302"), ("another scheme", "302|not followed"),
    ("cut short", "sent"), ("missing", "404"),
])  # fmt: skip
def test_what_a_server_does_wrong_is_one_clear_error(server, tmp_path, odd, message):
    url = server.url(written(tmp_path, "zip", 2, 1 << 16) if odd != "missing" else "nothing.pt")
    server.odd = odd
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(url)["layers.1.w"]
    assert str(caught.value).startswith(url)
    assert server.sent < 1 << 26


def test_a_file_that_changes_on_the_server_is_an_error(server, tmp_path):
    url = server.url(written(tmp_path, "zip", 2, 1 << 16))
    with open_checkpoint(url) as checkpoint:
        server.tag = "two"
        with pytest.raises(CheckpointError, match="changed on the server"):
            checkpoint["layers.1.w"]


def test_no_server_is_an_error():
    with pytest.raises(CheckpointError, match="can't be fetched"):
        open_checkpoint("http://127.0.0.1:9/a.pt")


def test_other_schemes_are_read_by_fsspec(tmp_path):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for kind in ("zip", "sharded"):
        name = written(tmp_path, kind, 2, 50_000)
        memory.put(f"{tmp_path}/*", "/set/")
        with open_checkpoint(f"memory://set/{name}") as checkpoint:
            assert checkpoint["layers.1.w"].sum() == 50_000
