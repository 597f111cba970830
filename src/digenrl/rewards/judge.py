"""A vision-language judge with a server of its own: vLLM's where that is installed
(the extra `judges`), else `vlm_server.py` on transformers. Both answer OpenAI's
`POST /v1/chat/completions` on a free port of 127.0.0.1, behind a token.

The end of the server ends this process, so that whoever watches the process starts both again.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import httpx
from torch import Tensor

from digenrl.cluster.signals import end_with_parent
from digenrl.model_folder import require_data
from digenrl.rewards.needs import flag_problems
from digenrl.rewards.protocol import build_scorer, identity_of
from digenrl.types import Prompt
from reward_models.qwen_vl import write_tiny
from reward_models.weights import checkpoint, files_digest

_POLL_S = 0.1
_KEY = "VLLM_API_KEY"
"""Environment variable in which both servers read their token."""


class Serve(TypedDict, total=False):
    """How the run starts a judge's server."""

    build: Literal["real", "tiny"]
    gpus: int
    args: Sequence[str]
    """Further words for `vllm serve`, of the flags in `digenrl.rewards.needs`."""


class JudgeNode(TypedDict):
    """Keys of a judge; its class takes further ones."""

    _target_: str
    model: str
    """Directory or hub id."""
    url: NotRequired[str]
    serve: NotRequired[Serve | None]
    token_env: NotRequired[str]


class ServedJudge:
    """Scorer that starts the server which it asks.

    Args:
        scorer: YAML node of the judge. `url` is replaced.
        gpus: numbers of the GPUs that the server takes; none = processors.
        start_s: seconds within which the server must answer.
    """

    def __init__(self, scorer: JudgeNode, gpus: Sequence[int], start_s: float) -> None:
        serve = scorer.get("serve") or {}
        build, words = serve.get("build", "real"), serve.get("args", ())
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        token = secrets.token_urlsafe(32)
        environment = {**os.environ, _KEY: token}
        if gpus:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            names = [seen[gpu] if len(seen) > gpu and seen[gpu] else str(gpu) for gpu in gpus]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        with checkpoint(_model_directory(scorer["model"], build), build, _write_model) as path:
            require_data(path)
            command = server_command(path, scorer["model"], port, len(gpus), words)
            self._server = subprocess.Popen(
                command, env=environment, preexec_fn=partial(end_with_parent, signal.SIGKILL)
            )
            lives = self._wait_for_server(port, start_s)
            self.weights_digest = files_digest(sorted(Path(path).glob("*.safetensors")))
        if not lives:
            self._server.kill()
            os._exit(1)  # a death, which is tried again within limits
        threading.Thread(target=self._end_with_server, daemon=True).start()
        os.environ[scorer.get("token_env", "DIGENRL_JUDGE_TOKEN")] = token
        url = f"http://127.0.0.1:{port}/v1"
        self._judge = build_scorer({**scorer, "url": url, "constrained": True})
        self.model_id = f"{identity_of(self._judge).model_id}, served by {command[3]}"

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return the judge's scores [B]."""
        return self._judge(media, prompts)

    def _wait_for_server(self, port: int, start_s: float) -> bool:
        """Return whether the server answers in time; say why it does not."""
        deadline = time.monotonic() + start_s
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while self._server.poll() is None and time.monotonic() < deadline:
                try:
                    if client.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        return True
                except httpx.HTTPError:
                    time.sleep(_POLL_S)
        code = self._server.poll()
        why = f"did not answer within {start_s:g} s" if code is None else f"ended with code {code}"
        print(f"The judge's server {why}: the lines above say why.", file=sys.stderr, flush=True)
        return False

    def _end_with_server(self) -> None:
        self._server.wait()
        os.kill(os.getpid(), signal.SIGKILL)


def server_command(
    path: str, name: str, port: int, gpus: int, more: Sequence[str] = ()
) -> list[str]:
    """Return the command that serves the model in the directory `path` under `name`.

    Raises:
        ValueError: `more` holds something else than allowed flags, or a name is an option.
    """
    problems = [
        *flag_problems(list(more)),
        *(f"{one}: is an option" for one in (path, name) if one.startswith("-")),
    ]
    if problems:
        raise ValueError(f"a judge's serve.args = {list(more)}: {'; '.join(problems)}.")
    where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", name]
    python = [sys.executable, "-P", "-m"]  # no module of the working directory
    if importlib.util.find_spec("vllm") is None:
        return [*python, "digenrl.rewards.vlm_server", path, *where]
    vllm = [*python, "vllm.entrypoints.cli.main", "serve", path, *where]
    return [*vllm, "--tensor-parallel-size", str(max(1, gpus)), *map(str, more)]


def _model_directory(model: str, build: str) -> str | None:
    if build == "tiny" or Path(model).exists():
        return model
    from huggingface_hub import snapshot_download

    return snapshot_download(model, local_files_only=True)


def _write_model(folder: Path) -> None:
    write_tiny(folder, "Qwen2_5_VL").save_pretrained(folder)
