"""Faults on order: a callback that makes one rank die, stop, raise or hang when it reaches a named
point for the n-th time.

In a configuration: `+callbacks.fault={_target_: tests.strategy.faults.Fault, point: reward, rank:
1, action: kill}` with `allow_targets=[tests]`. Callbacks are built on every rank before it joins
the run, so every point can be met.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from hydra.utils import get_object
from torch import Tensor

from digenrl.algorithms.base import PolicyModule
from digenrl.models.policy import Policy
from digenrl.rewards.protocol import RewardUnavailable
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout.engine import RolloutEngine
from digenrl.schedule.claims import Claims
from digenrl.strategy import checkpoint_storage, gradients
from digenrl.strategy.disaggregated import DisaggregatedStrategy
from digenrl.strategy.publishing import Publisher
from digenrl.transport.cells import StepBoard
from digenrl.transport.link import SocketLink
from digenrl.types import Prompt
from reward_models.digit_judge import DigitJudge

POINTS: dict[str, tuple[Any, str]] = {
    "claim": (Claims, "take_next_task"),
    "denoise": (RolloutEngine, "take_step"),
    "forward": (Policy, "velocity"),
    "decode": (RolloutEngine, "decode"),
    "evaluate": (RolloutEngine, "evaluate_prompts"),
    "save": (checkpoint_storage, "save_weights"),
    "reward": (RewardSuite, "score"),
    "scorer": (DigitJudge, "__call__"),
    "send": (SocketLink, "send"),
    "receive": (SocketLink, "receive"),
    "accumulate": (PolicyModule, "training_step"),
    "reduce": (gradients, "average_grads"),
    "publish": (Publisher, "publish"),
}
"""Besides these: `before_join` and `after_join`, around the moment when a rank joins the control
store."""


class InjectedError(RuntimeError):
    """Raised on order."""


class AllThere(pl.Callback):
    """Begins training when every rank listens: else a rank that starts late misses versions, and a
    broadcast to it begins late or never."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        for rank in range(strategy.world.size):
            strategy.control.wait_for(f"address/{rank}", f"rank {rank} to listen")


class Fault(pl.Callback):
    """Callback that makes a process fail when a rank comes to a point of its run.

    Args:
        point: a key of `POINTS`, before_join, after_join, or the dotted name of a method (of an
            extension, for example).
        rank: launch rank that must come to the point.
        action: kill (SIGKILL), stop (SIGSTOP) or raise (in another process by SIGALRM, whose
            handler raises). In its own process also hang, leave (exit with code 0), go (SIGTERM,
            then sleep until it is heard) or exhaust (take all memory).
        call: number of the passage at which the process fails, from 1.
        target: process that fails: self, launcher, or another launch rank.
        seconds: seconds of a hang; None = for ever.
        once: fail no more in an attempt that begins after the failure.
    """

    def __init__(
        self,
        point: str,
        rank: int,
        action: str,
        call: int = 1,
        target: str | int = "self",
        seconds: float | None = None,
        once: bool = False,
    ) -> None:
        self._once = once
        self._rank, self._action, self._left, self._target, self._seconds = (
            rank,
            action,
            call,
            target,
            seconds,
        )
        self._here: int | None = None
        self._pids = Path()
        self._lock = threading.Lock()
        join = DisaggregatedStrategy.setup_distributed

        def joining(strategy: DisaggregatedStrategy) -> None:
            self._here = strategy.world.rank
            self._pids = strategy.session.run_dir / "pids"
            self._pids.mkdir(parents=True, exist_ok=True)
            (self._pids / f".{self._here}").write_text(str(os.getpid()))
            (self._pids / f".{self._here}").rename(self._pids / str(self._here))
            if point == "before_join":
                self._strike()
            join(strategy)
            if point == "after_join":
                self._strike()

        DisaggregatedStrategy.setup_distributed = joining  # type: ignore[method-assign]
        if point not in ("before_join", "after_join"):
            home, _, method = point.rpartition(".")
            owner, name = (get_object(home), method) if home else POINTS[point]
            setattr(owner, name, self._guarded(getattr(owner, name)))

    def _guarded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if original.__name__ != "receive":
                self._strike()
            result = original(*args, **kwargs)
            if original.__name__ == "receive" and result is not None:
                self._strike()
            return result

        return guarded

    def _strike(self) -> None:
        with self._lock:
            if self._here != self._rank or self._left == 0:
                return
            self._left -= 1
            if self._left:
                return
        struck = self._pids / ".struck"
        if self._once and struck.exists():
            return
        if self._once:
            struck.touch()
        if self._target == "self" and self._action == "raise":
            raise InjectedError("injected fault")
        if self._action == "hang":
            threading.Event().wait(self._seconds)
            return
        if self._action == "leave":
            os._exit(0)
        if self._action == "go":
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(2.0)
            return
        held = []
        while self._action == "exhaust":
            held.append(b"x" * (64 << 20))
        os.kill(
            self._victim(),
            {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGALRM}[self._action],
        )
        if self._target == "launcher":  # it dies here, not somewhat later
            threading.Event().wait(60.0)

    def _victim(self) -> int:
        if self._target == "self":
            return os.getpid()
        if self._target == "launcher":
            return os.getppid()
        while not (file := self._pids / str(self._target)).exists():
            threading.Event().wait(0.01)
        return int(file.read_text())


class Leak(pl.Callback):
    """A rank that says every secret of its environment, and then fails with one: after the second
    RL step."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch < 1:
            return
        for name in ("DIGENRL_REWARD_TOKEN", "WANDB_API_KEY", "DIGENRL_JUDGE_TOKEN", "HF_TOKEN"):
            print(f"said on purpose: {os.environ[name]}")
            warnings.warn(f"warned on purpose: {os.environ[name]}", stacklevel=1)
            logging.getLogger("lightning.pytorch").warning(
                "logged on purpose: %s", os.environ[name]
            )
        raise InjectedError(f"told on purpose: {os.environ['DIGENRL_REWARD_TOKEN']}")


class Sleeper(DigitJudge):
    """A scorer that never returns from its third call."""

    calls = 0

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            threading.Event().wait()
        return super().__call__(media, prompts)


class NeverReady(DisaggregatedStrategy):
    """Trainers that find no fragment of the second RL step ready: they wait, and after a while the
    rollouts do too."""

    def cut_fragment(
        self, pending: Sequence[tuple[int, ...]], board: StepBoard
    ) -> tuple[int, ...] | None:
        return None if board.step else super().cut_fragment(pending, board)


class Broken(DigitJudge):
    """A scorer with a bug."""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        raise InjectedError("the scorer has a bug")


class Exiting(DigitJudge):
    """A scorer whose library ends the process."""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        sys.exit(3)


class Leaving(DigitJudge):
    """A scorer that ends its process, or raises what ends one, at its n-th call.

    Args:
        way: a key of `WAYS`.
        call: at the how-manieth call of this process.
    """

    WAYS: ClassVar[dict[str, Callable[[], Any]]] = {
        "exit": sys.exit,
        "exit-3": lambda: sys.exit(3),
        "os-exit": lambda: os._exit(0),
        "os-exit-3": lambda: os._exit(3),
        "interrupt": lambda: signal.raise_signal(signal.SIGINT),
        "keyboard": lambda: exec("raise KeyboardInterrupt"),
        "memory": lambda: exec("raise MemoryError"),
        "recursion": lambda: exec("raise RecursionError"),
        "abort": os.abort,
        "fault": lambda: signal.raise_signal(signal.SIGSEGV),
        "kill": lambda: signal.raise_signal(signal.SIGKILL),
        "term": lambda: signal.raise_signal(signal.SIGTERM),
        "stop-iteration": lambda: next(iter(())),
    }

    def __init__(self, *args: Any, way: str, call: int = 1, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._way, self._until = self.WAYS[way], call

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        self._until -= 1
        if self._until == 0:
            self._way()
        return super().__call__(media, prompts)


class Absent(DigitJudge):
    """A scorer whose service is away for good."""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        raise RewardUnavailable("the judge's service is down")


class Forgetful(DigitJudge):
    """A scorer that has no score for one sample of one prompt."""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        scores = super().__call__(media, prompts)
        forgotten = torch.tensor([prompt.text.endswith(FORGOTTEN) for prompt in prompts])
        return torch.where(forgotten, torch.full_like(scores, torch.nan), scores)


FORGOTTEN = "three"


class HalfIndifferent(DigitJudge):
    """A scorer that likes all samples of about every second prompt as much."""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        constant = torch.tensor([prompt.uid % 2 == 0 for prompt in prompts])
        return torch.where(constant, 0.5, super().__call__(media, prompts))


class Indifferent(DigitJudge):
    """A scorer that likes everything as much."""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        return torch.full_like(super().__call__(media, prompts), 0.5)
