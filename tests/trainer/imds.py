"""A small instance metadata service, version 2: no news until it is told some, and none without a token."""

import json
import secrets
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


def moment(seconds: float) -> str:
    """Write the time in so many seconds as EC2 does."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class MetadataServer:
    """The service on a free port of the loopback interface."""

    def __init__(self) -> None:
        self.news: dict[str, str] = {}
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def interrupt(self, seconds: float = 120.0) -> None:
        """Announce that the instance will be taken back."""
        self.news[INSTANCE_ACTION] = json.dumps({"action": "terminate", "time": moment(seconds)})

    def advise(self) -> None:
        """Recommend to leave the instance."""
        self.news[REBALANCE] = json.dumps({"noticeTime": moment(0)})

    def stop(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                if self.path != "/latest/api/token" or not 1 <= int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", 0)) <= 21600:
                    return self._answer(400, "")
                service.tokens.add(token := secrets.token_urlsafe())
                return self._answer(200, token)

            def do_GET(self) -> None:
                service.asked.append(self.path)
                if self.headers.get("X-aws-ec2-metadata-token") not in service.tokens:
                    return self._answer(401, "")
                if self.path not in service.news:
                    return self._answer(404, "")
                return self._answer(200, service.news[self.path])

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is that of the base class
                pass

        return Handler
