"""A scorer of sound is given the sound of its samples, wherever it is placed; no other scorer is."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from digenrl.rewards import frames
from digenrl.rewards.needs import needs_sound
from digenrl.rewards.protocol import RewardError
from digenrl.rewards.remote import RemoteScorer
from digenrl.rewards.service import RewardService
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt, Sound
from tests.rewards.services import Brightness, Loudness, running

NODE = {"_target_": "tests.rewards.services.Loudness"}
BRIGHT = {"_target_": "tests.rewards.services.Brightness"}
PROMPTS = [Prompt("rain"), Prompt("a bell"), Prompt("silence")]
MEDIA = torch.rand(3, 5, 3, 7, 9, generator=torch.Generator().manual_seed(0))
SOUND = Sound(torch.rand(3, 2, 11, generator=torch.Generator().manual_seed(1)) - 0.5, 24000)
LOUD = SOUND.waveform.abs().mean((1, 2)) * 24000


def test_a_class_a_node_or_its_key_says_that_it_hears() -> None:
    assert needs_sound(NODE)
    assert needs_sound(Loudness())
    assert not needs_sound(BRIGHT)
    assert not needs_sound(Brightness())
    assert not needs_sound({"_target_": "tests.rewards.services.NoSuch"})
    elsewhere = {"_target_": "digenrl.rewards.remote.RemoteScorer", "urls": ["http://a:1"]}
    assert not needs_sound(elsewhere)
    assert needs_sound(elsewhere | {"hears": True})


def test_a_suite_knows_who_hears_without_building_anybody() -> None:
    deaf, hears = {"scorer": BRIGHT}, {"scorer": NODE}
    both = RewardSuite({"bright": deaf}, heldout={"loud": hears})
    assert not both.needs_sound()
    assert both.needs_sound(heldout=True)
    assert RewardSuite({"bright": deaf, "loud": hears}).needs_sound()
    assert not RewardSuite({"bright": deaf}).needs_sound(heldout=True)
    assert "_scorers" not in vars(both)


@pytest.mark.parametrize(
    "placement", ["inline", pytest.param("process", marks=pytest.mark.processes)]
)
def test_scores_are_of_the_sound_and_of_the_media(placement: str) -> None:
    suite = RewardSuite({"loud": {"scorer": NODE}, "b": {"scorer": BRIGHT}}, placement=placement)
    try:
        scores = suite.score(MEDIA, PROMPTS, sound=SOUND)
        torch.testing.assert_close(scores["loud"], LOUD)
        torch.testing.assert_close(scores["b"], MEDIA.flatten(1).mean(1))
    finally:
        suite.close()


def test_a_service_gets_the_sound_of_each_part_of_a_batch() -> None:
    """A body has room for one sample and not for two."""
    whole = RewardService(Loudness())
    with running(whole) as url, closing(RemoteScorer([url], hears=True)) as scorer:
        body = len(frames.encode_request(MEDIA[:1], PROMPTS[:1], "x", sound=SOUND.rows(slice(1))))
        object.__setattr__(whole.limits, "max_body_bytes", int(1.6 * body) + 2048)
        silent = Sound(SOUND.waveform.clone(), SOUND.rate)
        silent.waveform[1] = 0
        scores = scorer(MEDIA, PROMPTS, silent)
        torch.testing.assert_close(scores[[0, 2]], LOUD[[0, 2]])
        assert scores[1].isnan()
        with pytest.raises(RewardError, match="HTTP 422"):
            scorer(MEDIA, PROMPTS)


def test_a_missing_score_is_asked_for_again_with_its_own_sound() -> None:
    class Forgetful(Loudness):
        asked = 0

        def __call__(self, media, prompts, sound):  # type: ignore[no-untyped-def]
            self.asked += 1
            scores = super().__call__(media, prompts, sound)
            return scores.index_fill(0, torch.tensor([1]), torch.nan) if self.asked == 1 else scores

    suite = RewardSuite({"loud": {"scorer": Forgetful()}}, placement="inline")
    torch.testing.assert_close(suite.score(MEDIA, PROMPTS, sound=SOUND)["loud"], LOUD)


def test_a_scorer_that_writes_into_a_sound_changes_nothing_but_its_own() -> None:
    class Writing(Loudness):
        def __call__(self, media, prompts, sound):  # type: ignore[no-untyped-def]
            scores = super().__call__(media, prompts, sound)
            sound.waveform.zero_()
            return scores

    suite = RewardSuite({n: {"scorer": Writing()} for n in "ab"}, placement="inline")
    scores = suite.score(MEDIA, PROMPTS, sound=SOUND)
    torch.testing.assert_close(scores["b"], LOUD)


def test_sound_that_is_absent_or_broken_is_refused() -> None:
    suite = RewardSuite({"loud": {"scorer": Loudness()}}, placement="inline")
    with pytest.raises(RewardError, match=r"Loudness scores sound, and these samples have none"):
        suite.score(MEDIA, PROMPTS)
    for broken in (SOUND.waveform[:2], SOUND.waveform[:, 0], SOUND.waveform / 0):
        with pytest.raises(RewardError, match=r"sound has shape .* for 3 prompts"):
            suite.score(MEDIA, PROMPTS, sound=Sound(broken, 24000))


def test_sound_comes_over_the_wire_as_it_was_and_before_the_images() -> None:
    frame = frames.encode_request(MEDIA[:, :1, :1], PROMPTS, "r", "uint8", sound=SOUND)
    json_bytes, payload_bytes = frames.parse_header(frame[: frames.HEADER.size])
    head = frames.HEADER.size + json_bytes
    request = frames.decode_request(frame[frames.HEADER.size : head], payload_bytes)
    found = frames.decode_sound(request, frame[head:])
    assert found is not None
    assert torch.equal(found.waveform, SOUND.waveform)
    assert found.rate == SOUND.rate
    assert request.images_begin == payload_bytes
    other = frames.encode_request(MEDIA, PROMPTS, "r", sound=SOUND.rows(slice(2)))
    json_bytes, payload_bytes = frames.parse_header(other[: frames.HEADER.size])
    head = frames.HEADER.size + json_bytes
    with pytest.raises(frames.FrameError, match="3 samples, sound of 2"):
        frames.decode_request(other[frames.HEADER.size : head], payload_bytes)
