"""A vision-language model as judge, behind any OpenAI-compatible endpoint (`POST
<url>/chat/completions`).

Each sample is one request: the question, the prompt and the picture (a video: several frames) as
PNG. The answer must be one JSON object `{"score": <number>}` on the asked scale; anything else is
missing, never a guess. Judges differ and
drift: another reward should be held out beside one.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError
from torch import Tensor

from digenrl.rewards.protocol import (
    RewardError,
    RewardUnavailable,
    require_images,
    rgb_bytes,
    source_images,
)
from digenrl.types import Prompt

QUESTION = (
    "Rate from 0 to 10 how well the picture shows what the prompt asks for, and how well it is "
    "made. "
    'Answer with one JSON object and nothing else: {"score": <number from 0 to 10>}. Prompt: '
    "{prompt}"
)
EDIT_QUESTION = (
    "The first picture was edited as the prompt asks; what follows is the result. Rate from 0 to "
    "10 how well the edit "
    "was done and how well everything else was kept: the lower of the two counts. "
    'Answer with one JSON object and nothing else: {"score": <number from 0 to 10>}. Prompt: '
    "{prompt}"
)
_MAX_ANSWER_BYTES = 1 << 18


class _Verdict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    score: FiniteFloat


class VlmJudge:
    """The judge's number / `scale`, in [0, 1].

    Args:
        url: base URL, up to and including the version (`http://127.0.0.1:8000/v1`).
        model: name that the endpoint serves.
        question: asked with each picture; `{prompt}` is the prompt's text.
        scale: best number that the question offers.
        frames: frames sent of a video.
        timeout_s: for each step of a request.
        deadline_s: for a whole call; what is not answered by then is missing.
        concurrency: requests under way.
        token_env: environment variable with the bearer token; unset = none is sent.
        constrained: ask the server for whole numbers alone (`response_format` with a schema).
        serve: how a judge is served that the run starts (placement managed); else unused.
    """

    def __init__(
        self,
        url: str,
        model: str,
        question: str = QUESTION,
        scale: float = 10.0,
        frames: int = 4,
        timeout_s: float = 60.0,
        deadline_s: float = 120.0,
        concurrency: int = 8,
        token_env: str = "DIGENRL_JUDGE_TOKEN",
        constrained: bool = False,
        serve: Mapping[str, Any] | None = None,
    ) -> None:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
            raise ValueError(
                f"{parsed.host or 'url'} is no judge URL: write http(s)://host:port/v1, without "
                "user or password."
            )
        if "{prompt}" not in question:
            raise ValueError(
                "question must contain {prompt}: a judge that is not told the prompt cannot judge "
                "it."
            )
        if not scale > 0 or concurrency < 1:
            raise ValueError(f"scale is {scale}, concurrency {concurrency}: both must be positive.")
        self.url, self.model, self.question = str(parsed).rstrip("/"), model, question
        self.scale, self.frames, self.deadline_s = scale, frames, deadline_s
        self._form = {"response_format": _form(int(scale))} if constrained else {}
        token = os.environ.get(token_env)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            headers=headers, timeout=timeout_s, follow_redirects=False, trust_env=False
        )
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="judge")
        digest = hashlib.blake2b(question.encode(), digest_size=4).hexdigest()
        whole = ", whole numbers" if constrained else ""
        self.model_id = (
            f"vlm_judge({model}, scale={scale:g}, frames={frames}, question={digest}{whole})"
        )
        self.weights_digest = "none"

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[B]. Raises RewardUnavailable (with the scores that there are) if a request or answer
        failed."""
        frames = rgb_bytes(media, self.frames)
        jobs = [
            self._pool.submit(self._judge, sample, prompt)
            for sample, prompt in zip(frames, prompts, strict=True)
        ]
        scores, causes = torch.full((len(prompts),), math.nan), []
        deadline = time.monotonic() + self.deadline_s
        for row, job in enumerate(jobs):
            try:
                scores[row] = job.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                job.cancel()
                causes.append(f"the judge did not answer within {self.deadline_s:g} s")
            except RewardUnavailable as error:
                causes.append(str(error))
        if causes:
            raise RewardUnavailable("; ".join(dict.fromkeys(causes)), scores)
        return scores

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _before(self, frames: Tensor, prompt: Prompt) -> list[Tensor]:
        """Return pictures [3, H, W] uint8 that are shown ahead of the sample's."""
        return []

    def _judge(self, frames: Tensor, prompt: Prompt) -> float:
        content: list[dict[str, Any]] = [
            {"type": "text", "text": self.question.replace("{prompt}", prompt.text)}
        ]
        pictures = [*self._before(frames, prompt), *frames]
        content += [
            {"type": "image_url", "image_url": {"url": _png(picture)}} for picture in pictures
        ]
        body = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": 64,
            "messages": [{"role": "user", "content": content}],
            **self._form,
        }
        try:
            with self._http.stream("POST", f"{self.url}/chat/completions", json=body) as response:
                if response.status_code in (401, 403, 404) or response.is_redirect:
                    raise RewardError(
                        f"The judge at {self.url} answered HTTP {response.status_code}: "
                        "check url, model and the token's variable."
                    )
                if response.status_code != 200:
                    raise RewardUnavailable(f"the judge answered HTTP {response.status_code}")
                raw = bytearray()
                for chunk in response.iter_bytes():
                    raw += chunk
                    if len(raw) > _MAX_ANSWER_BYTES:
                        raise RewardUnavailable(
                            f"the judge's answer exceeds {_MAX_ANSWER_BYTES} bytes"
                        )
        except httpx.HTTPError as error:
            raise RewardUnavailable(
                f"the judge cannot be reached: {type(error).__name__}"
            ) from error
        return self._verdict(bytes(raw))

    def _verdict(self, raw: bytes) -> float:
        try:
            text = json.loads(raw)["choices"][0]["message"]["content"]
            verdict = _Verdict.model_validate_json(
                text.strip().removeprefix("```json").strip("`").strip()
            )
        except (ValueError, LookupError, TypeError, AttributeError, ValidationError) as error:
            raise RewardUnavailable(
                f"the judge's answer is no {{score: number}}: {type(error).__name__}"
            ) from error
        if not 0 <= verdict.score <= self.scale:
            raise RewardUnavailable(
                f"the judge's score {verdict.score} lies outside 0..{self.scale:g}"
            )
        return verdict.score / self.scale


class EditJudge(VlmJudge):
    """A judge that is shown the image of the prompt first, then the sample; arguments as of
    `VlmJudge`."""

    reads_images = True

    def __init__(self, url: str, model: str, question: str = EDIT_QUESTION, **options: Any) -> None:
        super().__init__(url, model, question, **options)

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt without `image`."""
        require_images(prompts, "image")

    def _before(self, frames: Tensor, prompt: Prompt) -> list[Tensor]:
        return [rgb_bytes(source_images(frames, [prompt]), 1)[0, 0]]


def _form(most: int) -> dict[str, Any]:
    """Return the schema of an answer, as OpenAI's interface takes it."""
    number = {"type": "integer", "minimum": 0, "maximum": most}
    schema = {
        "type": "object",
        "properties": {"score": number},
        "required": ["score"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}


def _png(frame: Tensor) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame.movedim(0, -1).contiguous().numpy()).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
