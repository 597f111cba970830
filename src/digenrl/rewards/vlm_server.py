"""A vision-language model of transformers behind OpenAI's `POST /v1/chat/completions`, for one
judge on one machine: one request at a time, greedy, pictures as data URIs.

    python -m digenrl.rewards.vlm_server DIRECTORY --port 8000 --served-model-name NAME

A `response_format` of type json_schema may ask for a single integer. Then the answer is a number
between its minimum and maximum, because every generated token must continue such a number. The
bearer token is read from the variable VLLM_API_KEY, as by vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hmac
import json
import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NotRequired, TypedDict

import torch
from PIL.Image import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from digenrl import extras
from digenrl.images import FORMATS
from digenrl.images.reader import read_picture
from digenrl.model_folder import require_data
from digenrl.rewards.protocol import resolve_device
from digenrl.rewards.service import Gate, ServiceLimits, server_of

with extras.named_in_errors("serve", "a server of a vision-language model"):
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

_MOST_BYTES, _MOST_TOKENS = 64 << 20, 512
_MOST_PIXELS, _BODY_S = 1 << 26, 30.0


class Source(TypedDict):
    """Picture of a message, as a data URI."""

    url: str


class Part(TypedDict):
    """Text or picture of a message."""

    type: Literal["text", "image_url"]
    text: NotRequired[str]
    image_url: NotRequired[Source]


class Turn(TypedDict):
    """One message of a chat."""

    role: str
    content: str | list[Part]


class Range(TypedDict):
    """Whole numbers that an answer may hold."""

    minimum: int
    maximum: int


class Properties(TypedDict):
    """JSON schema of an object with one number."""

    properties: dict[str, Range]


class NamedSchema(TypedDict):
    """A JSON schema in OpenAI's form."""

    schema: Properties


class Form(TypedDict):
    """Form of an answer: any text, or an object of a JSON schema."""

    type: Literal["text", "json_schema"]
    json_schema: NotRequired[NamedSchema]


class Body(TypedDict):
    """Request for a chat completion, as far as the server reads it. A client may send anything."""

    model: str
    messages: list[Turn]
    max_tokens: NotRequired[int | None]
    response_format: NotRequired[Form | None]


class Chat:
    """The model, and its answers to requests of OpenAI's form."""

    def __init__(self, path: str, name: str) -> None:
        self.name, self.device = name, resolve_device("auto")
        require_data(path)
        self.processor = AutoProcessor.from_pretrained(path, local_files_only=True)
        model = AutoModelForImageTextToText.from_pretrained(
            path, dtype="auto", local_files_only=True
        )
        self.model = model.to(self.device).eval()

    @torch.no_grad()
    def generate_answer(self, body: Body) -> str:
        """Return the answer's text. Raises LookupError, TypeError or ValueError for another
        form."""
        turns, pictures = [], list[Image]()
        for message in body["messages"]:
            content = message["content"]
            parts: list[Part] = (
                [{"type": "text", "text": content}] if isinstance(content, str) else content
            )
            shown = [_decode_picture(part) for part in parts if part["type"] == "image_url"]
            pictures += shown
            kept = [
                {"type": "image"}
                if part["type"] == "image_url"
                else {"type": "text", "text": part["text"]}
                for part in parts
            ]
            turns.append({"role": message["role"], "content": kept})
        chat = self.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        inputs = self.processor(text=[chat], images=pictures or None, return_tensors="pt")
        inputs = inputs.to(self.device)
        began = inputs["input_ids"].size(1)
        answers = self._allowed_answers(body.get("response_format"))

        def allowed_tokens(_: int, ids: torch.Tensor) -> list[int]:
            said = ids[began:].tolist()
            going = [a for a in answers if a[: len(said)] == said and len(a) > len(said)]
            return sorted({a[len(said)] for a in going}) or [self._end]

        made = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=min(int(body.get("max_tokens") or _MOST_TOKENS), _MOST_TOKENS),
            **({"prefix_allowed_tokens_fn": allowed_tokens} if answers else {}),
        )
        text: str = self.processor.tokenizer.decode(made[0, began:], skip_special_tokens=True)
        return text

    @property
    def _end(self) -> int:
        return int(self.processor.tokenizer.eos_token_id)

    def _allowed_answers(self, form: Form | None) -> list[list[int]]:
        """Return the tokens of every answer that `form` allows; [] = any answer."""
        if form is None or form["type"] == "text":
            return []
        ((key, kind),) = form["json_schema"]["schema"]["properties"].items()
        numbers = range(kind["minimum"], kind["maximum"] + 1)
        texts = [json.dumps({key: number}) for number in numbers]
        ids: Sequence[list[int]] = self.processor.tokenizer(texts, add_special_tokens=False)[
            "input_ids"
        ]
        return [[*each, self._end] for each in ids]


def _decode_picture(part: Part) -> Image:
    kind, _, data = part["image_url"]["url"].partition(";base64,")
    if not kind.startswith("data:image/"):
        raise ValueError("pictures are sent as data URIs; nothing is fetched")
    content = base64.b64decode(data, validate=True)
    return read_picture(content, FORMATS, _MOST_PIXELS).convert("RGB")


def make_app(chat: Chat, token: str | None, hosts: Sequence[str] | None = None) -> Gate:
    """Return the ASGI application. `hosts`: see `Gate`."""
    worker = ThreadPoolExecutor(1, thread_name_prefix="vlm")

    async def answer_health(request: Request) -> Response:
        return Response()

    async def complete_chat(request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(
            given.encode(), f"Bearer {token}".encode()
        ):
            return _refusal_response(401, "a bearer token is needed")
        raw = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.stream():
                    raw += chunk
                    if len(raw) > _MOST_BYTES:
                        return _refusal_response(413, f"the body exceeds {_MOST_BYTES} bytes")
        except TimeoutError:
            return _refusal_response(408, f"the body was not complete after {_BODY_S:g} s")
        except ClientDisconnect:
            return Response(status_code=400)
        try:
            body = json.loads(raw)
            if body["model"] != chat.name:
                return _refusal_response(404, f"{chat.name} is served here")
            text = await asyncio.get_running_loop().run_in_executor(
                worker, chat.generate_answer, body
            )
        except (LookupError, TypeError, ValueError, OSError) as error:
            return _refusal_response(400, f"{type(error).__name__}: {error}")
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"object": "chat.completion", "model": chat.name, "choices": [choice]})

    routes = [
        Route("/health", answer_health),
        Route("/v1/chat/completions", complete_chat, methods=["POST"]),
    ]
    return Gate(Starlette(routes=routes), hosts)


def _refusal_response(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


def main(words: Sequence[str]) -> None:
    """Load the model, then serve it until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", required=True)
    given = parser.parse_args(words)
    token = os.environ.get("VLLM_API_KEY")
    if not token:
        parser.error("set VLLM_API_KEY: other users of this machine reach loopback too")
    served = make_app(Chat(given.path, given.served_model_name), token, ())
    limits = ServiceLimits(max_connections=1 << 10)  # every rank asks at once
    with socket.create_server((given.host, given.port)) as listener:
        server_of(served, limits).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1:])
