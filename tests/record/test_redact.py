"""Secrets are masked by name, shape and environment; ordinary words are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.record.redact import MASK, is_secret_name, redact, redact_text


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "logger.wandb.api_key",
        "HF_TOKEN",
        "token",
        "db_password",
        "client_secret",
        "DB_PASS",
        "DB_PWD",
        "OPENAI_KEY",
        "AWS_SECRET_ACCESS_KEY",
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "num_tokens",
        "max_tokens",
        "tokenizer",
        "token_env",
        "token_file",
        "key",
        "keyboard",
        "author",
        "PWD",
        "run_key",
    ],
)
def test_ordinary_names(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "sk-abcdefghijklmnopqrstuvwx",
        "ghp_0123456789abcdefghijABCD",
        "AKIA0123456789ABCDEF",
        "http://user:canary@host/score",
        "trainer.api_key=canary",
        "password: canary",
        "Authorization: Bearer canary-c0ffee",
        '{"authorization": "Basic canary"}',
        "curl -H 'bearer canary-0123456789abcdef'",
        "postgres://me:canary/with/slashes@host/db",
        "postgres://me:canary with spaces@host/db",
        "password='canary with spaces'",
        '{"db_pass": "canary"}',
        "SMTP_PWD=canary",
        "OPENAI_KEY=canary",
        "github_pat_11ABCDEFG0_canarycanarycanary",
        "api_org_canaryABCDEFGHIJKLMNOPQRS",
        "run_hf_canaryABCDEFGHIJKLMNOP",
        "glpat-canary-0123456789abc",
        "ASIA0123456789ABCDEF",
    ],
)
def test_secrets_in_text(text: str) -> None:
    shown = redact_text(f"before {text} after")
    assert MASK in shown
    assert "canary" not in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")


@pytest.mark.parametrize(
    "text",
    [
        "http://host:80/score, mail a@b",
        "a bearer token is needed",
        "data.key: value",
        "/data/sk-lab-flux-lora-prompts/mine.txt",
        "sk-learn-digits-of-v2-prompts is a folder",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact_text(text) == text


def test_a_path_that_is_there_is_no_secret_whatever_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("sk-proj-fluxlorapromptsofthelab", "hf_fluxlorapromptsofthelab", "api_key=prompts")
    for name in names:
        (tmp_path / name).mkdir()
        path = str(tmp_path / name)
        assert redact({"prompts": [path]}) == {"prompts": [path]}
        assert redact({"token": path}) == {"token": MASK}, "what its key calls a secret is one"
        assert MASK in redact(f"{path}-absent")
    monkeypatch.setenv("MY_SERVICE_TOKEN", "fluxloraprompts")
    assert redact(str(tmp_path / names[0])) == MASK.join([f"{tmp_path}/", ""]), (
        "a secret of the environment is one anywhere"
    )


@pytest.mark.parametrize(
    "token", ["sk-proj-Ab3-d_canaryABCDEF0123456-x9", "sk-ant-api03-canaryABCDEFGH0123-45AA"]
)
def test_keys_with_hyphens_are_secrets(token: str) -> None:
    assert "canary" not in redact_text(f"/data/{token}/x and {token}")


def test_environment_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "c0ffee-c0ffee")
    monkeypatch.setenv("NUM_TOKENS", "twelve-twelve")
    monkeypatch.setenv("DB_PASSWORD", "eight-ch")
    monkeypatch.setenv("DB_SECRET", "sevench")
    said = redact_text("c0ffee-c0ffee twelve-twelve eight-ch sevench")
    assert said == f"{MASK} twelve-twelve {MASK} sevench", "a short word may be an ordinary one"


@given(
    st.recursive(
        st.none() | st.integers() | st.text("abc 12:/.", max_size=12),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["a", "steps", "tokenizer"]), inner)
        ),
    )
)
def test_values_without_secrets_are_unchanged(value: object) -> None:
    assert redact(value) == value


def test_nested_values() -> None:
    tree = {"a": {"api_key": "x", "urls": ["http://u:p@h/"]}, "token": None, "password": ["p", "q"]}
    expected = {
        "a": {"api_key": MASK, "urls": [f"http://{MASK}@h/"]},
        "token": None,
        "password": [MASK, MASK],
    }
    assert redact(tree) == expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    [
        "x",
        "x-",
        "a.b",
        "http://",
        "key ",
        'key="',
        "-eyJaaaaaaaaaaaa",
        "bearer ",
        "authorization: ",
    ],
)
def test_a_long_text_takes_a_time_that_grows_with_its_length(piece: str) -> None:
    """Some 10 ms for each; with a search from every letter it would be minutes."""
    text = piece * (300_000 // len(piece))
    assert len(redact_text(text)) > 0
