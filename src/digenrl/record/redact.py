"""Keep secrets out of messages, config.yaml, logs and reports.

A secret is recognised by the name of its key, by the shape of its value, or as the value of an
environment variable with a secret's name. `num_tokens`, `tokenizer` or `token_env` are not secrets.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import overload

MASK = "<redacted>"

# `sk-` begins words of ordinary names as well, so it needs a run of letters and digits without a
# hyphen: no sk-lab-flux-prompts.
# Texts come from anywhere, so each pattern must take a time that grows with their length alone: a
# run of letters begins in one place or has a largest length.

_SECRET_NAME = re.compile(
    r"(^|_)(api_?key|access_?key|secret|secret_?key|password|passwd|passphrase|credentials?|auth|authorization|bearer|token"
    r"|(openai|anthropic|hf|huggingface|wandb|github|google|gemini|azure|private|signing|encryption)_?key)$"
    r"|\w_(pass|pwd)$",  # PWD alone is a directory
    re.IGNORECASE,
)
_SECRET_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])((?:hf|api_org)_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|AIza[\w-]{30,}|wandb_v\d_[A-Za-z0-9_]{16,}|sk-(?=[A-Za-z0-9_-]{0,200}?[A-Za-z0-9_]{16})[A-Za-z0-9_-]{16,}|gh[pousr]_[\w.-]{20,}"
    r"|A[KS]IA[0-9A-Z]{16}|xox[abeprs]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,2000}\.[\w-]{10,4000}\.[\w-]{10,})"
)
_URL_USER = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]{0,30}://)[^/\s@]+@")
_URL_PASSWORD = re.compile(
    r"(?P<scheme>\b[a-zA-Z][\w+.-]{0,30}://)[^\s:/@]*:(?!\d{1,5}(?:[/?#\s,;)]|$))[^@\n\"'<>]{1,128}@"
)
"""A password with a slash or a space; digits up to a slash are a port."""
_BEARER = re.compile(
    r"(?P<head>\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?|\bbearer\s+(?=[^\s\"',}]{16}))"
    r"[^\s\"',}]+",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(
    r"(?P<name>(?<![\w.])[\w.]*(?:api_?key|access_?key|secret|password|passwd|passphrase|bearer|token|_pass|_pwd|key))"
    r"(?P<sign>[\"']?\s*[=:]\s*)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s,}\]]+)",
    re.IGNORECASE,
)
_SHORTEST_SECRET = 8  # a shorter environment value would mask ordinary words


# Asked of the same keys and variables for each line of a log.
@functools.lru_cache(maxsize=4096)
def is_secret_name(key: str) -> bool:
    """Return whether the last part of a dotted `key` names a secret."""
    return bool(_SECRET_NAME.search(key.rsplit(".", 1)[-1]))


def redact_text(text: str) -> str:
    """Return `text` without known token shapes, user names in URLs, `key=value` secrets and secrets
    of the environment.

    Example:
        >>> redact_text("https://me:word@host/x api_key=abc123 lr=1e-4")
        'https://<redacted>@host/x api_key=<redacted> lr=1e-4'
    """
    text = _SECRET_SHAPE.sub(MASK, text)
    text = _URL_USER.sub(lambda match: f"{match['scheme']}{MASK}@", text)
    text = _URL_PASSWORD.sub(lambda match: f"{match['scheme']}{MASK}@", text)
    text = _BEARER.sub(lambda match: f"{match['head']}{MASK}", text)
    text = _ASSIGNMENT.sub(
        lambda match: (
            f"{match['name']}{match['sign']}{MASK}" if is_secret_name(match["name"]) else match[0]
        ),
        text,
    )
    for secret in _environment_secrets():
        text = text.replace(secret, MASK)
    return text


def _environment_secrets() -> list[str]:
    """Return the values of environment variables with a secret's name."""
    # Each look at a value decodes it, so only those of secrets are looked at.
    values = [os.environ.get(name, "") for name in os.environ if is_secret_name(name)]
    return [value for value in values if len(value) >= _SHORTEST_SECRET]


@overload
def redact(value: Mapping[str, object]) -> dict[str, object]: ...
@overload
def redact(value: object, key: str = "") -> object: ...
def redact(value: object, key: str = "") -> object:
    """Return `value` (nested dicts and lists of plain values) with every secret replaced by a
    mask.

    Example:
        >>> redact({"api_key": "abc", "steps": 4, "rows": [{"token": "abc"}]})
        {'api_key': '<redacted>', 'steps': 4, 'rows': [{'token': '<redacted>'}]}
    """
    if isinstance(value, Mapping):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, key) for item in value]
    if value not in (None, "") and is_secret_name(key):
        return MASK
    if not isinstance(value, str) or _is_there(value):
        return value
    return redact_text(value)


def _is_there(value: str) -> bool:
    """Return whether `value` is an absolute path on this machine. A name of a file is no secret,
    whatever its shape, unless it holds one of the environment."""
    if not (os.path.isabs(value) and os.path.lexists(value)):
        return False
    return not any(secret in value for secret in _environment_secrets())
