"""`make serve-reward REWARD=ocr`: one reward as an HTTP service.

    digenrl serve-reward reward=ocr port=8700

Every key of configs/serve_reward.yaml may follow as key=value. The service always needs a token. It
comes from the variable named by `token_env`, or is made and written to `token_file` (mode 0600),
which the service removes when it ends. A run that uses the service reads it from the variable
DIGENRL_REWARD_TOKEN. The line with the URL is printed when requests are accepted. SIGTERM or Ctrl-C
ends the service within three seconds.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from digenrl.config.command_settings import ServeRewardSettings
from digenrl.reward_command import reward_command, reward_suite

if TYPE_CHECKING:
    from digenrl.rewards.suite import RewardSuite


def main(argv: Sequence[str]) -> int:
    """Serve until interrupted; `reward_command` describes the exit codes."""
    return reward_command("serve_reward", __doc__, argv, _serve_reward)


def _serve_reward(settings: ServeRewardSettings) -> None:
    from digenrl.rewards.service import (
        RewardService,
        ServiceLimits,
        describe_service,
        serve_rewards,
    )

    limits = ServiceLimits(**settings.limits.model_dump())
    suite = reward_suite(settings)
    token, made = service_token(settings.token_env, Path(settings.token_file))

    def remove_token() -> None:
        if made is not None:
            made.unlink(missing_ok=True)

    try:
        service = RewardService(suite.find_scorer(_served_name(settings, suite)), limits, token)
        print(f"serve_reward: {describe_service(service)}", file=sys.stderr, flush=True)
        serve_rewards(
            service,
            settings.host,
            settings.port,
            announce_address,
            list(settings.hosts),
            remove_token,
        )
    finally:
        remove_token()
        suite.close()


def announce_address(url: str) -> None:
    """Print the line that tells a person or a script that requests are accepted."""
    print(f"serving at {url}", flush=True)


def _served_name(settings: ServeRewardSettings, suite: RewardSuite) -> str:
    if settings.name is None and len(suite.names) > 1:
        raise ValueError(f"The mixture holds {', '.join(suite.names)}: choose one with name=...")
    return settings.name or suite.names[0]


def service_token(variable: str, file: Path) -> tuple[str, Path | None]:
    """Return the token that requests must carry, and the file that was made for it: the token comes
    from the environment, or is a new one in `file`.

    Raises FileExistsError if `file` exists: a token is neither overwritten nor taken from a file of
    unknown origin.
    """
    if token := os.environ.get(variable):
        return token, None
    token = secrets.token_urlsafe(32)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise FileExistsError(
            f"{file} exists: set {variable} to its content, or remove it for a new token."
        ) from error
    with os.fdopen(descriptor, "w") as target:
        target.write(token)
    print(f"serve_reward: the token was written to {file.absolute()}", file=sys.stderr)
    return token, file.absolute()
