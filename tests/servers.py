"""Servers on the loopback interface, for tests of what is read from elsewhere."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class FileServer:
    """Files over HTTP, with byte ranges; it can break connections, as long ones do."""

    root: Path
    ranges: bool = True
    break_after: int = 0
    """Cut this many answers off after half of their bytes."""
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Path and first byte of every request."""
    address: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self) -> Iterator["FileServer"]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = outer.root / self.path.lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return
                content = path.read_bytes()
                wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                begin = int(wanted[1]) if wanted and outer.ranges else 0
                outer.asked.append((self.path, int(wanted[1]) if wanted else 0))
                self.send_response(206 if begin else 200)
                self.send_header("Content-Length", str(len(content) - begin))
                self.end_headers()
                with outer.lock:  # requests may come at the same time
                    cut = outer.break_after > 0 and len(content) > 1000
                    outer.break_after -= cut
                self.wfile.write(content[begin : begin + len(content) // 2] if cut else content[begin:])

            def log_message(self, *_words: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
