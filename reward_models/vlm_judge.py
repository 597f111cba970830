"""A vision-language model as judge, behind any OpenAI-compatible endpoint (`POST
<url>/chat/completions`).

Each sample is one request: the question, the prompt and the picture (a video: several frames) as
PNG. The answer must be one JSON object `{"score": <number>}` on the asked scale; anything else is
missing, never a guess. A server that is busy or broken is asked again. Judges differ and drift:
another reward should be held out beside one.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
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
from pydantic import ConfigDict, FiniteFloat, TypeAdapter
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
PAIR_QUESTION = (
    "Which of the two pictures shows better what the prompt asks for, and is better made? Answer "
    'with one JSON object and nothing else: {"better": 1} for the first, {"better": 2} for the '
    'second, {"better": 0} if neither is better. Prompt: {prompt}'
)
_MAX_ANSWER_BYTES = 1 << 18


_NUMBER = TypeAdapter(FiniteFloat, config=ConfigDict(strict=True))


class _Again(RewardUnavailable):
    """A failure after which the same question may be answered."""

    after_s: float | None = None
    """Seconds that the server asks to wait."""


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
        retries: further requests after no connection, HTTP 408, 429 or 5xx, within the deadline.
        budget: requests that this process may send in all, which bounds what a paid judge costs;
            one more ends the run. null = no bound.
        concurrency: requests under way.
        token_env: environment variable with the bearer token; unset = none is sent.
        constrained: ask the server for whole numbers alone (`response_format` with a schema).
        serve: how a judge is served that the run starts (placement managed); else unused.
    """

    name, key = "vlm_judge", "score"
    """Names: the judge's in its identity, and the number's in an answer of JSON ("" = no JSON)."""
    text_last = False
    """Whether the question follows the pictures."""
    max_tokens = 64
    """Tokens of an answer."""

    def __init__(
        self,
        url: str,
        model: str,
        question: str = QUESTION,
        scale: float = 10.0,
        frames: int = 4,
        timeout_s: float = 60.0,
        deadline_s: float = 120.0,
        retries: int = 2,
        budget: int | None = None,
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
        self.retries, self.budget, self._sent = retries, budget, itertools.count(1)
        self._form = _form(self.key, int(scale)) if constrained and self.key else {}
        token = os.environ.get(token_env)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            headers=headers, timeout=timeout_s, follow_redirects=False, trust_env=False
        )
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="judge")
        digest = hashlib.blake2b(question.encode(), digest_size=4).hexdigest()
        whole = ", whole numbers" if self._form else ""
        self.model_id = (
            f"{self.name}({model}, scale={scale:g}, frames={frames}, question={digest}{whole})"
        )
        self.weights_digest = "none"

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return scores [B]. Raises RewardUnavailable, with the scores that there are, if a request
        or answer failed."""
        shown = [
            [*self._before(frames, prompt), *frames]
            for frames, prompt in zip(rgb_bytes(media, self.frames), prompts, strict=True)
        ]
        values, causes = self._ask(shown, prompts)
        return _complete(values, causes)

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _before(self, frames: Tensor, prompt: Prompt) -> list[Tensor]:
        """Return pictures [3, H, W] uint8 that are shown ahead of the sample's."""
        return []

    def _ask(
        self, shown: Sequence[Sequence[Tensor]], prompts: Sequence[Prompt]
    ) -> tuple[list[float], list[str]]:
        """Return for each list of pictures [3, H, W] the judge's number, NaN where there is none,
        and the causes."""
        deadline = time.monotonic() + self.deadline_s
        jobs = [
            self._pool.submit(self._judge, pictures, prompt, deadline)
            for pictures, prompt in zip(shown, prompts, strict=True)
        ]
        values, causes = [math.nan] * len(jobs), []
        for row, job in enumerate(jobs):
            try:
                values[row] = job.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                job.cancel()
                causes.append(f"the judge did not answer within {self.deadline_s:g} s")
            except RewardUnavailable as error:
                causes.append(str(error))
        return values, causes

    def _judge(self, pictures: Sequence[Tensor], prompt: Prompt, deadline: float) -> float:
        text = {"type": "text", "text": self.question.replace("{prompt}", prompt.text)}
        seen = [{"type": "image_url", "image_url": {"url": _png(one)}} for one in pictures]
        body = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "messages": [
                {"role": "user", "content": [*seen, text] if self.text_last else [text, *seen]}
            ],
            **self._form,
        }
        for attempt in itertools.count():
            try:
                raw = self._post(body)
                break
            except _Again as error:
                wait_s = 0.5 * 2**attempt if error.after_s is None else error.after_s
                if attempt >= self.retries or time.monotonic() + wait_s > deadline:
                    raise
                time.sleep(wait_s)
        try:
            return self.number(json.loads(raw)["choices"][0]["message"]["content"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RewardUnavailable(
                f"the judge's answer is not of the form that was asked: {type(error).__name__}"
            ) from error

    def _post(self, body: dict[str, Any]) -> bytes:
        """Return the body of one answer; _Again where another request may help."""
        if self.budget is not None and next(self._sent) > self.budget:
            raise RewardError(
                f"The judge at {self.url} has had {self.budget} requests from this process, which "
                "is scorer.budget: raise it, or train for fewer RL steps."
            )
        raw = bytearray()
        try:
            with self._http.stream("POST", f"{self.url}/chat/completions", json=body) as response:
                code = response.status_code
                if code in (401, 403, 404) or response.is_redirect:
                    raise RewardError(
                        f"The judge at {self.url} answered HTTP {code}: "
                        "check url, model and the token's variable."
                    )
                if code in (408, 429) or code >= 500:
                    again = _Again(f"the judge answered HTTP {code}")
                    if (after := response.headers.get("Retry-After", "")).isdecimal():
                        again.after_s = float(after)
                    raise again
                if code != 200:
                    raise RewardUnavailable(f"the judge answered HTTP {code}")
                for chunk in response.iter_bytes():
                    raw += chunk
                    if len(raw) > _MAX_ANSWER_BYTES:
                        raise RewardUnavailable(
                            f"the judge's answer exceeds {_MAX_ANSWER_BYTES} bytes"
                        )
        except httpx.HTTPError as error:
            raise _Again(f"the judge cannot be reached: {type(error).__name__}") from error
        return bytes(raw)

    def number(self, answer: str) -> float:
        """Return the score in [0, 1] of an answer; ValueError, or like it, for another form."""
        fenced = answer.strip().removeprefix("```json").strip("`").strip()
        score = _NUMBER.validate_python(json.loads(fenced)[self.key])
        if not 0 <= score <= self.scale:
            raise RewardUnavailable(f"the judge's score {score} lies outside 0..{self.scale:g}")
        return score / self.scale


class PairJudge(VlmJudge):
    """Share of its comparisons that a sample wins, with every other sample of its prompt in the
    call (as CodeGoat24/Pref-GRPO); arguments as of `VlmJudge`.

    Each pair is asked twice, the pictures swapped. A judge that answers by the place and not by the
    picture thus gives each a half. `sampling.task_size` says how many samples meet; a sample
    without another has no score. Of a video its middle frame is compared.
    """

    name, key = "pair_judge", "better"

    def __init__(self, url: str, model: str, question: str = PAIR_QUESTION, **options: Any) -> None:
        super().__init__(url, model, question, **{**options, "scale": 2.0, "frames": 1})

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B]; raises as `VlmJudge`."""
        pictures, rows = rgb_bytes(media, 1)[:, 0], range(len(prompts))
        pairs = [(a, b) for a, b in itertools.permutations(rows, 2) if prompts[a] == prompts[b]]
        shown = [[pictures[a], pictures[b]] for a, b in pairs]
        values, causes = self._ask(shown, [prompts[a] for a, _ in pairs])
        won = dict(zip(pairs, values, strict=True))
        games = [[(won[a, b] + 1 - won[b, a]) / 2 for a, b in pairs if a == row] for row in rows]
        alone = "a sample met no other of its prompt: sampling.task_size must be 2 or more"
        return _complete([torch.tensor(each).nanmean() for each in games], causes or [alone])

    def number(self, answer: str) -> float:
        """Return 1 where the first picture is better, 0 where the second is, else a half."""
        return {0.0: 0.5, 0.5: 1.0, 1.0: 0.0}[super().number(answer)]


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


def _complete(found: Sequence[float | Tensor], causes: Sequence[str]) -> Tensor:
    """Return the scores [B], or raise RewardUnavailable with them where one is missing."""
    scores = torch.tensor([float(each) for each in found])
    if scores.isnan().any():
        raise RewardUnavailable("; ".join(dict.fromkeys(causes)), scores)
    return scores


def _form(key: str, most: int) -> dict[str, Any]:
    """Return the schema of an answer, as OpenAI's interface takes it."""
    number = {"type": "integer", "minimum": 0, "maximum": most}
    schema = {
        "type": "object",
        "properties": {key: number},
        "required": [key],
        "additionalProperties": False,
    }
    verdict = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    return {"response_format": verdict}


def _png(frame: Tensor) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame.movedim(0, -1).contiguous().numpy()).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
