"""The child of `digenrl.rewards.process.ProcessScorer`: `python -m digenrl.rewards.process_worker <socket descriptor>`.

First frame in: the scorer's YAML node; answer: its identity. Every further frame: a score request; answer: the scores
as raw fp32 bytes. A failing scorer is reported and ends the process; so does the end of the socket or of the parent.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

import torch

from digenrl.rewards import frames
from digenrl.rewards.placement import build_scorer
from digenrl.rewards.process import receive, send
from digenrl.rewards.protocol import RewardUnavailable, check_scores, identity_of

_ANSWER_S = 60.0


def main(descriptor: int) -> None:
    """Serves one parent until it goes away."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with socket.socket(fileno=descriptor) as connection:
        try:
            document, _ = receive(connection, None)
            scorer = build_scorer(json.loads(document))
            identity = identity_of(scorer)
            _answer(connection, {"kind": "ready", **vars(identity)})
            while True:
                document, payload = receive(connection, None)
                request = frames.decode_request(document, len(payload))
                media = frames.decode_media(request.media, bytearray(payload))
                try:
                    with torch.no_grad():
                        scores = scorer(media, frames.decode_prompts(request))
                    scores = check_scores(identity.model_id, scores, len(request.prompts))
                    _answer(connection, {"kind": "scores"}, scores.numpy().tobytes())
                except RewardUnavailable as error:
                    _answer(connection, {"kind": "unavailable", "message": str(error)})
        except EOFError:
            return
        except Exception as error:
            _answer(connection, {"kind": "error", "message": f"{type(error).__name__}: {error}"})
            raise


def _answer(connection: socket.socket, document: dict[str, str], payload: bytes = b"") -> None:
    send(connection, frames.encode_frame(json.dumps(document), payload), time.monotonic() + _ANSWER_S)


def _end_with_parent(parent: int) -> None:
    """A scorer may compute for minutes without looking at its socket: leave as soon as the parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
