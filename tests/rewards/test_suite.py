from __future__ import annotations

import inspect
import io
import math
from contextlib import contextmanager

import pytest
import torch
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from digenrl.images import PromptImage
from digenrl.rewards import needs, protocol
from digenrl.rewards.protocol import (
    Identity,
    RewardError,
    RewardUnavailable,
    identity_of,
    laplacian,
    luma,
    rgb_bytes,
    sample_frames,
    source_images,
)
from digenrl.rewards.published import files_read
from digenrl.rewards.suite import RewardSuite, combine_scores
from digenrl.types import Prompt
from tests.conftest import ROOT

PROMPTS = [Prompt("a"), Prompt("b"), Prompt("c")]
MEDIA = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def brightness(media, prompts):
    return media.flatten(1).mean(1)


def suite(scorer, **options):
    return RewardSuite({"r": {"scorer": scorer, "weight": 1.0}}, placement="inline", **options)


def test_scores_are_raw_and_held_out_ones_only_on_request():
    mixture = RewardSuite(
        {
            "bright": {"scorer": brightness, "weight": 2.0},
            "logged": {"scorer": lambda m, p: -m.flatten(1).mean(1), "weight": 0},
        },
        heldout={"kept": {"scorer": brightness}},
        placement="inline",
    )
    scores = mixture.score(MEDIA, PROMPTS)
    assert list(scores) == ["bright", "logged"] == list(mixture.names)
    torch.testing.assert_close(scores["bright"], MEDIA.flatten(1).mean(1))
    assert mixture.weights == {"bright": 2.0, "logged": 0.0}
    assert list(mixture.score(MEDIA, PROMPTS, heldout=True)) == ["bright", "logged", "kept"]
    torch.testing.assert_close(combine_scores(scores, mixture.weights), 2 * scores["bright"])


def test_unavailable_is_missing_never_zero_and_counted():
    def down(media, prompts):
        raise RewardUnavailable("service is down")

    rewards = suite(down, min_missing_samples=6, max_missing_share=0.5)
    assert torch.isnan(rewards.score(MEDIA, PROMPTS)["r"]).all()
    rewards.check_missing()
    rewards.score(MEDIA, PROMPTS)
    count = rewards.failure_counts()["r"]
    assert (count.scored, count.missing, count.causes["service is down"]) == (0, 6, 6)
    with pytest.raises(RewardError, match=r"`r` is missing for 6 of 6.*service is down"):
        rewards.check_missing()


@pytest.mark.parametrize(
    ("least", "share", "stops"), [(6, 1 / 3, False), (6, 0.33, True), (7, 0, False)]
)
def test_more_than_the_allowed_share_of_enough_samples_stops(least, share, stops):
    def first_is_missing(media, prompts):
        return torch.tensor([math.nan if prompt is PROMPTS[0] else 0.5 for prompt in prompts])

    rewards = suite(first_is_missing, min_missing_samples=least, max_missing_share=share)
    told = []
    rewards.on_missing = lambda *facts: told.append(facts)
    for _ in range(2):
        rewards.score(MEDIA, PROMPTS)
    assert told == [("r", 1, "the scorer gave no finite score")] * 2
    count = rewards.failure_counts()["r"]
    assert (count.scored, count.missing, count.causes.total()) == (4, 2, 2)
    if stops:
        with pytest.raises(RewardError, match=r"missing for 2 of 6 samples \(33%"):
            rewards.check_missing()
    else:
        rewards.check_missing()


def test_a_sample_is_asked_for_once_more_before_it_counts_as_missing():
    asked = []

    def flaky(media, prompts):
        asked.append([prompt.text for prompt in prompts])
        scores = brightness(media, prompts)
        lost = [
            prompt.text == "b" or (prompt.text == "c" and len(asked) == 1) for prompt in prompts
        ]
        return torch.where(torch.tensor(lost), torch.nan, scores)

    rewards, told = suite(flaky), []
    rewards.on_missing = lambda *facts: told.append(facts)
    scores = rewards.score(MEDIA, PROMPTS)["r"]
    assert asked == [["a", "b", "c"], ["b", "c"]]
    assert scores.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(scores[[0, 2]], brightness(MEDIA, PROMPTS)[[0, 2]])
    assert (rewards.failure_counts()["r"].scored, rewards.failure_counts()["r"].missing) == (2, 1)
    assert told == [("r", 1, "the scorer gave no finite score")]


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_an_infinite_score_is_a_missing_one(infinity):
    rewards = suite(
        lambda m, p: torch.tensor([infinity if prompt.text == "b" else 1.0 for prompt in p])
    )
    assert rewards.score(MEDIA, PROMPTS)["r"].isnan().tolist() == [False, True, False]
    assert rewards.failure_counts()["r"].causes == {"the scorer gave no finite score": 1}


def test_a_missing_member_stays_missing_in_the_sum():
    rewards = RewardSuite(
        {
            "a": {"scorer": brightness},
            "b": {
                "scorer": lambda m, p: torch.tensor(
                    [math.nan if prompt.text == "b" else 1.0 for prompt in p]
                )
            },
        },
        placement="inline",
    )
    assert rewards.weights == {"a": 1.0, "b": 1.0}, "where nothing else is said"
    total = combine_scores(rewards.score(MEDIA, PROMPTS), rewards.weights)
    assert torch.isnan(total).tolist() == [False, True, False]


@pytest.mark.parametrize(
    "bad",
    [
        lambda m, p: torch.zeros(2),
        lambda m, p: torch.zeros(3, 1),
        lambda m, p: torch.zeros(3, dtype=torch.int64),
        lambda m, p: [0.0, 0.0, 0.0],
        lambda m, p: None,
    ],
)
def test_a_broken_scorer_stops_the_run(bad):
    with pytest.raises(RewardError, match="Reward `r` returned"):
        suite(bad).score(MEDIA, PROMPTS)


def test_a_bug_in_a_scorer_is_not_swallowed():
    def bug():
        raise KeyError("bug")

    place = rf"test_suite\.py, line {bug.__code__.co_firstlineno + 1}\)"
    with pytest.raises(RewardError, match=rf"raised KeyError: 'bug' \(.*{place}"):
        suite(lambda media, prompts: bug()).score(MEDIA, PROMPTS)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (torch.zeros(3, 4, 8, 8), "shape"),
        (torch.zeros(2, 3, 8, 8), "2 samples but 3 prompts"),
        (torch.zeros(3, 3, 8, 8, dtype=torch.uint8), "dtype"),
        (torch.zeros(3, 3, 8), "shape"),
        (torch.zeros(3, 1, 2, 3, 8, 8), "shape"),
        (torch.zeros(3, 2, 8, 8), "shape"),
        (torch.zeros(3, 3, 0, 8), "shape"),
        (torch.full((3, 3, 8, 8), 1.002), "spans"),
        (torch.full((3, 3, 8, 8), -0.002), "spans"),
        (torch.full((3, 3, 8, 8), math.nan), "spans"),
    ],
)
def test_media_outside_the_protocol_is_refused(media, message):
    with pytest.raises(ValueError, match=message):
        suite(brightness).score(media, PROMPTS)


def test_media_of_each_shape_and_at_the_ends_of_the_range_are_scored():
    for shape, value in (((1, 8, 8), 1.0009), ((3, 8, 8), -0.0009), ((2, 3, 8, 8), 1.0)):
        scores = suite(brightness).score(torch.full((3, *shape), value), PROMPTS)
        assert scores["r"].tolist() == pytest.approx([value] * 3)


@pytest.mark.parametrize(
    ("rewards", "heldout", "message"),
    [
        ({}, {}, "empty"),
        (
            {"r": {"scorer": brightness, "wieght": 1}},
            {},
            "`wieght`; known: scorer, weight, placement",
        ),
        ({"r": {"weight": 1}}, {}, "no `scorer`"),
        ({"r": {"scorer": brightness, "weight": math.nan}}, {}, "finite number"),
        ({"r": {"scorer": brightness, "weight": True}}, {}, "finite number"),
        ({"r": {"scorer": brightness, "weight": 0}}, {}, "nothing would be optimised"),
        ({"r": {"scorer": brightness}}, {"r": {"scorer": brightness}}, "held out at once"),
        (
            {"r": {"scorer": brightness}},
            {"h": {"scorer": brightness, "weight": 1}},
            "unknown key `weight`",
        ),
        ({"r": {"scorer": brightness, "placement": "thred"}}, {}, "`thred`.*inline"),
        ({"r": {"scorer": 3}}, {}, "callable"),
        ({"r": {"scorer": {"target": "x"}}}, {}, "no `_target_`"),
    ],
)
def test_a_wrong_mixture_is_refused_with_the_remedy(rewards, heldout, message):
    with pytest.raises(ValueError, match=message):
        RewardSuite(rewards, heldout)


def test_urls_of_an_unknown_reward_are_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"reward\.urls names unknown rewards \['q'\]; known: \['r'\]"
    ):
        RewardSuite({"r": {"scorer": brightness}}, urls={"q": ["http://localhost:1"]})


def test_an_unknown_name_lists_the_known_ones():
    assert suite(brightness).find_scorer("r") is brightness
    with pytest.raises(KeyError, match="known: r"):
        suite(brightness).find_scorer("q")


def test_yaml_builds_the_suite():
    node = OmegaConf.create(
        {
            "_target_": "digenrl.rewards.suite.RewardSuite",
            "_recursive_": False,
            "rewards": {
                "jpeg": {
                    "weight": -1.0,
                    "scorer": {"_target_": "reward_models.jpeg_size.JpegSize", "quality": 50},
                }
            },
        }
    )
    rewards = instantiate(node)
    assert rewards.weights == {"jpeg": -1.0}
    assert (rewards.score(MEDIA, PROMPTS)["jpeg"] < 0).all()
    assert (
        rewards.scorer_identities()["jpeg"].model_id
        == "jpeg_size(quality=50, maximise=False, frames=4)"
    )


def test_frames_are_spread_over_the_video():
    video = torch.arange(10.0).view(1, 10, 1, 1, 1).expand(1, 10, 1, 2, 2)
    assert sample_frames(video, 2)[0, :, 0, 0, 0].tolist() == [2, 7]
    assert sample_frames(video, 10).shape == sample_frames(video, 99).shape == video.shape
    assert sample_frames(video[:, 0], 4).shape == (1, 1, 1, 2, 2)


def test_a_scorer_that_writes_into_its_input_changes_nothing_but_its_own():
    class Vandal:
        def __call__(self, media, prompts):
            return media.fill_(0.5).flatten(1).mean(1)

    media = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    kept = media.clone()
    suite = RewardSuite(
        {"vandal": {"scorer": Vandal()}, "mean": {"scorer": lambda m, p: m.flatten(1).mean(1)}}
    )
    scores = suite.score(media, [Prompt("a")] * 3)
    assert torch.equal(media, kept)
    assert torch.equal(scores["mean"], kept.flatten(1).mean(1))


def test_the_defaults_are_those_of_the_configuration():
    stored = yaml.safe_load((ROOT / "configs/reward/_suite.yaml").read_text())
    given = inspect.signature(RewardSuite).parameters
    for key, value in stored.items():
        if not key.startswith("_") and key != "urls":
            assert given[key].default == value, key


def test_eight_causes_are_kept_and_counted_and_the_commonest_is_told():
    causes = iter([f"cause {number}" for number in range(10) for _ in range(2)] + ["cause 3"] * 2)

    def down(media, prompts):
        raise RewardUnavailable(next(causes))

    rewards = suite(down)
    assert rewards.failure_counts()["r"].share == 0.0
    for _ in range(11):
        rewards.score(MEDIA, PROMPTS)
    count = rewards.failure_counts()["r"]
    assert count.causes == {f"cause {n}": 3 + 3 * (n == 3) for n in range(8)}
    assert (count.missing, count.share) == (33, 1.0)
    count.causes.clear()
    assert rewards.failure_counts()["r"].causes, "a copy"
    rewards.min_missing_samples = 33
    with pytest.raises(RewardError, match="Commonest cause: cause 3"):
        rewards.check_missing()


def test_an_unavailable_scorer_may_give_the_scores_that_it_has():
    def partly(media, prompts):
        raise RewardUnavailable("busy", torch.tensor([1.0, math.nan, math.inf])[: len(prompts)])

    rewards = suite(partly)
    assert rewards.score(MEDIA, PROMPTS)["r"].tolist()[0] == 1.0
    assert rewards.failure_counts()["r"].causes == {"busy": 1}


def test_a_scorer_is_built_once_marked_while_it_works_and_asked_without_gradients():
    built, stages = [], []

    class Counted:
        def __init__(self):
            built.append(torch.rand(1))

        def __call__(self, media, prompts):
            assert not torch.is_grad_enabled()
            assert stages == ["r"]
            return media.flatten(1).mean(1)

    @contextmanager
    def stage(name):
        stages.append(name.removeprefix("score "))
        yield

    class Built(RewardSuite):
        def __init__(self):
            super().__init__({"r": {"scorer": brightness}}, placement="inline")
            self._makers = {"r": Counted}

    rewards = Built()
    rewards.stage = stage
    assert not built
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    rewards.build_scorers()
    assert torch.equal(torch.rand(1), wanted), "the run's numbers are untouched"
    rewards.score(MEDIA, PROMPTS)
    assert (len(built), stages) == (1, ["r"])


def test_brightness_edges_and_bytes_of_pictures():
    grey = torch.tensor([[0.0, 1.0], [0.5, 0.25]]).view(1, 1, 2, 2)
    assert torch.equal(luma(grey), grey)
    colours = torch.eye(3).view(3, 3, 1, 1)
    assert luma(colours).flatten().tolist() == pytest.approx([0.299, 0.587, 0.114])
    frames = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 4.0]]).view(1, 1, 3, 3)
    wanted = [[0.0, 1.0, 0.0], [1.0, -4.0, 5.0], [0.0, 5.0, -8.0]]
    assert laplacian(frames)[0, 0].tolist() == wanted
    shown = rgb_bytes(torch.tensor([1.5, 0.5, -0.5]).view(3, 1, 1, 1), 4)
    assert shown.shape == (3, 1, 3, 1, 1)
    assert shown[:, 0, 0, 0, 0].tolist() == [255, 128, 0]
    assert shown.dtype == torch.uint8


def test_a_prompts_own_picture_comes_in_the_size_of_the_media_and_in_its_colours():
    file = io.BytesIO()
    image = Image.new("RGB", (4, 2), (255, 51, 0))
    image.putpixel((3, 0), (0, 0, 255))
    image.save(file, "PNG")
    pictures = [PromptImage(role, "d", data=file.getvalue()) for role in ("reference", "image")]
    prompts = [Prompt("an edit", images=(*pictures,)), Prompt("another", images=(*pictures,))]
    found = source_images(torch.zeros(2, 3, 2, 4), prompts)
    assert (found.shape, found.dtype) == ((2, 3, 2, 4), torch.float32)
    assert found[1, :, 1, 3].tolist() == pytest.approx([1.0, 0.2, 0.0])
    assert found[0, :, 0, 3].tolist() == [0.0, 0.0, 1.0]
    assert source_images(torch.zeros(2, 1, 3, 8, 6), prompts).shape == (2, 3, 8, 6)
    protocol.require_images(prompts, "image", "reference")
    bare = [prompts[0], Prompt("no picture", images=(pictures[0],))]
    with pytest.raises(RewardError, match="'no picture' has no image: name a file in the field"):
        source_images(torch.zeros(2, 3, 2, 4), bare)
    with pytest.raises(ValueError, match="it has no image; name a file in the field image"):
        protocol.require_images(bare, "reference", "image")


def test_weights_of_the_hub_are_looked_for_on_this_machine_alone(monkeypatch):
    asked = []

    def snapshot(name, **how):
        asked.append((name, how["local_files_only"], how["allow_patterns"]))
        if name == "nobody/absent":
            raise LocalEntryNotFoundError("it is not here")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert needs.download_remedy("nobody/here", "judge.scorer.path", "source") is None
    said = needs.download_remedy("nobody/absent", "judge.scorer.path", "source")
    assert "`hf download nobody/absent`" in said
    assert said.endswith("or set judge.scorer.path=DIRECTORY")
    assert asked == [(f"nobody/{name}", True, files_read("path")) for name in ("here", "absent")]


def test_a_node_becomes_plain_values():
    assert protocol.plain_node(OmegaConf.create({"a": 1, "b": {"c": "${a}"}})) == {
        "a": 1,
        "b": {"c": 1},
    }
    given = {"a": 1}
    assert protocol.plain_node(given) == given


def test_a_scorer_is_known_by_its_name_and_the_digest_of_its_weights():
    class Named:
        model_id, weights_digest = "a model", "abc"

    class Plain:
        pass

    assert identity_of(Named()) == Identity("a model", "abc")
    assert identity_of(Plain()).model_id.endswith("Plain")
    assert identity_of(Plain()).weights_digest == "none"


def test_a_device_without_a_number_is_the_ranks_own(monkeypatch):
    here = torch.device("cuda", 3)
    monkeypatch.setattr(protocol.accelerator, "device_kind", lambda: "cuda")
    monkeypatch.setattr(protocol.accelerator, "current_device", lambda: here)
    monkeypatch.setattr(protocol.accelerator, "is_own", lambda device: device.type == "cuda")
    found = {name: protocol.resolve_device(name) for name in ("auto", "cuda", "cuda:0", "cpu")}
    assert found == {
        "auto": here, "cuda": here, "cuda:0": torch.device("cuda", 0), "cpu": torch.device("cpu"),
    }  # fmt: skip


def test_prompts_are_shown_to_every_scorer_that_checks_them():
    class Checks:
        def __init__(self):
            self.seen = []

        def __call__(self, media, prompts):
            return brightness(media, prompts)

        def check_prompts(self, prompts):
            self.seen.append(prompts)

    trained, heldout, prompts = Checks(), Checks(), [Prompt("one")]
    RewardSuite(
        {"r": {"scorer": trained}, "plain": {"scorer": brightness}},
        heldout={"h": {"scorer": heldout}},
    ).check_prompts(prompts)
    assert trained.seen == heldout.seen == [prompts]
