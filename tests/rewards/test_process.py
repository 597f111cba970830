"""A scorer in a process of its own: same scores, and its death is a missing score, not the run's."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch

from digenrl.rewards.process import ProcessScorer
from digenrl.rewards.protocol import RewardError, RewardUnavailable, identity_of
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt
from reward_models.jpeg_size import JpegSize

pytestmark = pytest.mark.processes

NODE = {"_target_": "reward_models.jpeg_size.JpegSize", "quality": 80}
PROMPTS = [Prompt("a", metadata={"k": 1}), Prompt("b")]
MEDIA = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_scores_equal_inline_and_a_killed_child_starts_again():
    suite = RewardSuite({"jpeg": {"scorer": NODE}}, placement="process")
    scorer = suite.scorer("jpeg")
    expected = JpegSize(80)(MEDIA, PROMPTS)
    try:
        assert torch.equal(suite.score(MEDIA, PROMPTS)["jpeg"], expected)
        assert identity_of(scorer) == identity_of(JpegSize(80))
        video = MEDIA[:, None].expand(2, 3, 3, 16, 16)
        assert torch.equal(suite.score(video, PROMPTS)["jpeg"], expected)
        pid = scorer._child.pid
        os.kill(pid, signal.SIGSTOP)
        scorer._call_s = 0.3
        began = time.monotonic()
        with pytest.raises(RewardUnavailable, match=r"did not answer within 0\.3 s"):
            scorer(MEDIA, PROMPTS)
        assert time.monotonic() - began < 3
        assert not psutil.pid_exists(pid)
        scorer._call_s = 60
        assert torch.equal(suite.score(MEDIA, PROMPTS)["jpeg"], expected)
        assert suite.failures()["jpeg"].missing == 0
    finally:
        suite.close()
    assert scorer._child is None


def test_a_scorer_that_fails_names_its_error():
    scorer = ProcessScorer({"_target_": "reward_models.jpeg_size.JpegSize", "quality": 500})
    with pytest.raises(RewardError, match=r"JPEG quality lies in 1\.\.95") as caught:
        scorer(MEDIA, PROMPTS)
    assert not isinstance(caught.value, RewardUnavailable)
    scorer.close()
