"""A server that scores actions, in place of a reward model: a role of its own next to ``rl_trainer.py``."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BEST = 3


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        actions = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([-abs(action - BEST) for action in actions]).encode())

    def log_message(self, *args: object) -> None: ...


if __name__ == "__main__":
    port = int(os.environ["HPC_TRAIN_ROLE_JUDGE_PORT"])
    print(f"judge listens on port {port}", flush=True)
    ThreadingHTTPServer(("", port), Judge).serve_forever()
