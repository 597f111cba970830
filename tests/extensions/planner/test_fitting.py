"""Memory before anything starts: nine tenths are planned with, and what does not fit is refused
with a way out."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from functools import cache

import pytest

from digenrl import config as configuration
from digenrl.config import Composed
from digenrl.extensions.planner.advice import PlannerAdvisor, memory_lines
from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.cli.plan import as_configured
from digenrl.extensions.planner.costing import MOST_VALUES
from digenrl.extensions.planner.counts import kept_bytes
from digenrl.extensions.planner.plan_text import memory_by_role
from digenrl.extensions.planner.reading import candidate_of, costing_of, drawn_of, has_counted_sizes
from digenrl.settle import settle_run, with_task_size
from digenrl.strategy import exchange
from tests.models.test_experiments import EXPERIMENTS

pytestmark = pytest.mark.heavy

PROFILES = (
    "cpu",
    "cpu_tiny",
    "node_8xh100",
    "single_24gb",
    "single_gpu",
    "l40x32",
    "l40x32_h20x16",
    "a100x32",
    "h20x16",
    "testbed_a",
    "testbed_ac",
    "testbed_b",
    "testbed_c",
    "unequal",
)
USUAL = {
    ("wan21_flowgrpo", "single_gpu"),
}
USUAL |= {
    ("qwen_image_flowgrpo", "unequal"),
    ("flux1_dancegrpo", "single_gpu"),
    ("sd35_flowgrpo", "cpu_tiny"),
}


@cache
def loaded(*words: str) -> Composed:
    return configuration.load(list(words))


def assert_fits(composed: Composed) -> None:
    """Assert that at most nine tenths of every GPU are filled, by the memory model's own
    figures."""
    config = composed.settings
    if not has_counted_sizes(composed):
        return
    costing = costing_of(composed)
    allocation = config.allocation
    candidate = candidate_of(
        config, allocation.trainers, allocation.rollouts, costing.work.trained_steps
    )
    for (pool, _), use in costing.rank_memory(candidate).items():
        assert use.gib <= 0.9 * costing.hardware.find_pool(pool).memory_gib


@pytest.mark.parametrize(
    ("experiment", "profile"),
    [
        pytest.param(*pair, marks=() if pair in USUAL else pytest.mark.slow)
        for pair in itertools.product(EXPERIMENTS, PROFILES)
    ],
)
def test_every_experiment_runs_on_every_profile_or_says_why_not(
    experiment: str, profile: str
) -> None:
    """A refusal names what is needed and what there is; the change that it names makes the run
    fit."""
    words = (f"experiment={experiment}", f"hardware={profile}")
    try:
        assert_fits(settle_run(loaded(*words), PlannerAdvisor()))
    except ValueError as error:
        message = str(error)
        assert re.search(r"needs [\d.]+ GiB of [\d.]+ GiB \(90% of [\d.]+\)", message)
        if "no split of this profile's GPUs fits" not in message:
            (change,) = re.findall(r": set (.*)\.$", message)
            assert_fits(settle_run(loaded(*words, *change.split()), PlannerAdvisor()))


def test_what_does_not_fit_is_said_of_one_step_a_forward() -> None:
    words = ("experiment=flux1_flowgrpo", "hardware=single_24gb", "allocation.trainers=1")
    told = []
    for batch in ("auto", "1"):
        with pytest.raises(ValueError, match="needs") as caught:
            settle_run(loaded(*words, f"schedule.tsp.batch={batch}"), PlannerAdvisor())
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("experiment=wan21_flowgrpo", "hardware=a100x32", "schedule.tsp.batch=19"),
            r"set schedule\.tsp\.batch=1\.$",
        ),
        (
            ("experiment=hunyuanvideo_dancegrpo", "hardware=a100x32", "parallel.sharding=ddp"),
            r"set parallel\.sharding=fsdp\.$",
        ),
        (
            ("experiment=hunyuanvideo_dancegrpo", "hardware=a100x32", "parallel.compress=0.01"),
            r"set parallel\.compress=off parallel\.sharding=fsdp\.$",
        ),
        (
            (
                "experiment=flux1_flowgrpo",
                "hardware=node_8xh100",
                "model.gradient_checkpointing=false",
                "schedule.tsp.batch=5",
            ),
            r"set (schedule\.tsp\.batch=1|model\.gradient_checkpointing=auto)\.$",
        ),
        (
            (
                "experiment=wan21_dancegrpo",
                "hardware=a100x32",
                "model=wan21_14b",
                "sampling.height=720",
                "sampling.width=1280",
                "sampling.frames=81",
                "parallel.sharding=fsdp",
            ),
            r"trainer on b \(A100-SXM-80GB\) needs .*: set sampling\.eval\.batch=1 "
            r".*parallel\.context=8\.$",
        ),
        (
            (
                "experiment=wan21_dancegrpo",
                "hardware=a100x32",
                "model=wan21_14b",
                "sampling.height=480",
                "sampling.width=832",
                "sampling.frames=81",
                "parallel.sharding=fsdp",
            ),
            r"set parallel\.context=8\.$",
        ),
    ],
    ids=["steps", "replicas", "compressed", "kept", "720p", "480p"],
)
def test_a_misfit_is_refused_with_the_change_that_fits(
    words: tuple[str, ...], message: str
) -> None:
    trainers = "allocation.trainers=8" if "h100" not in words[1] else "allocation.trainers=4"
    with pytest.raises(ValueError, match=message):
        settle_run(loaded(*words, trainers, "schedule.auto=false"), PlannerAdvisor())


A100 = (
    "{{gpu:A100-SXM-80GB,count:4,role:{},memory_gib:80,tflops:312,hbm_tb_s:2,intra_gb_s:300,"
    "inter_gb_s:25,per_node:4}}"
)
APART = (
    "hardware=node_8xh100",
    "~hardware.pools.h100",
    *(f"+hardware.pools.{name}={A100.format('auto')}" for name in ("here", "far")),
    "+hardware.links={wan:{between:[here,far],gb_s:0.2}}",
    "schedule.auto=false",
    "allocation.trainers=6",
    "allocation.rollouts=2",
)
"""Six trainers in two places of four GPUs each."""


@pytest.mark.parametrize("asked", ["0.01", "auto"])
def test_the_remedy_of_trainers_in_two_places_is_accepted(asked: str) -> None:
    """Whole gradients of shards do not cross a line, so only trainers of one place can shard."""
    words = ("experiment=hunyuanvideo_dancegrpo", *APART, f"parallel.compress={asked}")
    with pytest.raises(ValueError, match=r"needs .*: set .*\.$") as caught:
        settle_run(loaded(*words), PlannerAdvisor())
    (change,) = re.findall(r": set (.*)\.$", str(caught.value))
    assert_fits(settle_run(loaded(*words, *change.split()), PlannerAdvisor()))


@pytest.mark.parametrize(
    ("words", "splits"),
    [
        (("parallel.compress=0.3",), [(2, 6), (3, 5)]),
        (("parallel.compress=auto", "hardware.pools.h100.count=2"), [(2, 0)]),
    ],
    ids=["share", "auto"],
)
def test_no_split_is_chosen_whose_share_of_gradients_is_refused(
    words: tuple[str, ...], splits: list[tuple[int, int]]
) -> None:
    sync = ("experiment=sd35_flowgrpo", "hardware=node_8xh100", "schedule=sync", *words)
    assert settle_run(loaded(*sync), PlannerAdvisor()).settings.allocation.split in splits


FULL = (
    "experiment=sd35_flowgrpo",
    "model.lora=null",
    "model.keep_reference=true",
    "algorithm.kl_weight=0",
    "hardware=node_8xh100",
    "hardware.pools.h100.count=4",
    "hardware.pools.h100.memory_gib=141",
    "allocation.rollouts=2",
    "schedule=sync",
)
"""All 2.2 billion weights, of which a replica fits."""


@pytest.mark.parametrize("trainers", ["2", "auto"])
def test_more_values_than_an_exchange_can_number_are_refused_before_the_run(trainers: str) -> None:
    assert MOST_VALUES == exchange.MOST_VALUES
    words = (*FULL, f"allocation.trainers={trainers}", "parallel.compress=0.01")
    said = (
        rf"0\.01: 2\d+ values are trained, at most {MOST_VALUES} can be: set parallel\.compress=off"
    )
    with pytest.raises(ValueError, match=said) as caught:
        settle_run(loaded(*words), PlannerAdvisor())
    (change,) = re.findall(r": set (.*)\.$", str(caught.value))
    assert_fits(settle_run(loaded(*words, *change.split()), PlannerAdvisor()))


def test_all_weights_are_sharded_without_being_asked() -> None:
    """The first way that fits: replicas of a small model, a copy per node, one over all
    trainers."""
    chosen = {
        experiment: settle_run(
            loaded(
                f"experiment={experiment}",
                "hardware=a100x32",
                "schedule=sync",
                "schedule.tsp.batch=auto",
            ),
            PlannerAdvisor(),
        ).settings.parallel.sharding
        for experiment in ("flux1_flowgrpo", "flux1_dancegrpo")
    }
    assert chosen["flux1_flowgrpo"] == "ddp"
    assert chosen["flux1_dancegrpo"] in ("hsdp", "fsdp")


@pytest.mark.parametrize("schedule", ["sync", "auto"])
def test_weights_are_sharded_where_auto_compresses_nothing(schedule: str) -> None:
    """All GPUs are in one place, so `auto` means off, and replicas are not the only way."""
    words = ("experiment=flux1_dancegrpo", "hardware=a100x32", f"schedule={schedule}")
    off, auto = (
        settle_run(loaded(*words, f"parallel.compress={asked}"), PlannerAdvisor()).settings
        for asked in ("off", "auto")
    )
    assert auto.parallel.compress == "off"
    assert auto.parallel.sharding in ("hsdp", "fsdp")
    assert auto == off


def test_auto_task_sizes_follow_the_pixels_and_not_the_schedule() -> None:
    """A GPU waits for launches at 512 pixels, and for arithmetic at 1024."""
    words = (
        "experiment=sd35_flowgrpo",
        "sampling.task_size=auto",
        "data.group_size=24",
        "algorithm/advantage=group",
    )

    def size(*more: str, hardware: str = "node_8xh100") -> int:
        return int(
            with_task_size(
                loaded(*words, f"hardware={hardware}", *more), PlannerAdvisor()
            ).settings.sampling.task_size
        )

    large = ("sampling.height=1024", "sampling.width=1024")
    small = size()
    assert size(*large) <= 2 < small
    assert {size(f"schedule={schedule}") for schedule in ("sync", "colocated", "full")} == {small}
    assert size(*large, hardware="cpu_tiny") == 6, "nobody has counted a tiny build"
    given = ("schedule=sync", "allocation.trainers=1", "allocation.rollouts=1")  # no plan is made
    assert (
        settle_run(
            loaded(*words, "hardware=node_8xh100", *given), PlannerAdvisor()
        ).settings.sampling.task_size
        == small
    )


@pytest.mark.parametrize(
    ("hardware", "build"), [("cpu_tiny", "tiny"), ("a100x32", "real"), ("single_gpu", "tiny")]
)
def test_blocks_are_computed_again_only_where_memory_is_short(hardware: str, build: str) -> None:
    """A tiny build is short of none; a real one whose sizes nobody has counted repeats every
    block."""
    words = ("experiment=sd35_flowgrpo", f"hardware={hardware}", f"hardware.build={build}")
    words += ("allocation.trainers=1", "allocation.rollouts=0", "model.gradient_checkpointing=auto")
    composed = loaded(*words)
    kept: object = False
    if build == "real":
        costing = costing_of(composed)
        candidate = candidate_of(composed.settings, 1, 0, costing.work.trained_steps)
        kept = costing.choose_recompute(candidate, costing.hardware.pools[0]).config
        uncounted = settle_run(
            replace(composed, choices={**composed.choices, "model": "unknown"}), PlannerAdvisor()
        )
        assert uncounted.settings.tree.model.gradient_checkpointing is True
    assert settle_run(composed, PlannerAdvisor()).settings.tree.model.gradient_checkpointing == kept


def test_compiled_blocks_are_computed_again_whole() -> None:
    """Compiled blocks show no operators: a policy refuses to keep the values of some."""
    words = ("experiment=wan21_flowgrpo", "hardware=single_gpu", "schedule.tsp.batch=1")
    found = []
    for compiled in ("false", "true"):
        composed = loaded(*words, f"model.compile={compiled}", "allocation.rollouts=0")
        costing = costing_of(composed)
        candidate = candidate_of(composed.settings, 1, 0, costing.work.trained_steps)
        found.append(costing.choose_recompute(candidate, costing.hardware.pools[0]))
    plain, whole = found
    assert plain.products > 0.0
    assert (whole.products, whole.attention) == (0.0, 0.0)
    assert whole.inputs > 0.0


def test_what_is_always_there_is_counted() -> None:
    """Reward models, evaluation and encoders in use: each makes the rank larger that has it.
    Trainers have room for an evaluation in any case: they take over where no rollout is left."""
    base = (
        "experiment=flux1_flowgrpo",
        "hardware=node_8xh100",
        "allocation.trainers=4",
        "allocation.rollouts=4",
    )
    base += ("schedule=sync",)

    def memory(*words: str) -> dict[str, float]:
        composed = settle_run(loaded(*base, *words), PlannerAdvisor())
        costing = costing_of(composed)
        table = costing.rank_memory(
            candidate_of(composed.settings, 4, 4, costing.work.trained_steps)
        )
        return {role: use.gib for (_, role), use in table.items()}

    whole, unwatched = memory(), memory("~callbacks.evaluation")
    jpeg = memory("reward=jpeg")
    assert unwatched["trainer"] < whole["trainer"]
    apart = "allocation.evaluation=trainers"
    assert unwatched["rollout"] == memory(apart)["rollout"]
    many = "callbacks.evaluation.samples_per_prompt=64"
    assert memory(many, apart)["rollout"] == unwatched["rollout"] < memory(many)["rollout"]
    assert whole["rollout"] - jpeg["rollout"] == pytest.approx(4 * 0.99e9 / 2**30)
    alone = memory("data.prompt_store=null")
    costing = costing_of(loaded("experiment=flux1_flowgrpo", "hardware=node_8xh100"))
    assert alone["rollout"] > 2 * (costing.work.sizes["parameters"] + 4.7e9) / 2**30, (
        "encoders are used on the GPU"
    )
    assert whole["rollout"] < alone["rollout"] - 3.0, "with a store they have left memory"


def test_what_waits_on_the_host_is_counted_shown_and_refused() -> None:
    """Activations of all blocks of four trainers of a node; of published versions one, or three
    with asynchrony."""
    base = (
        "experiment=flux1_flowgrpo",
        "hardware=node_8xh100",
        "allocation.trainers=4",
        "allocation.rollouts=4",
    )
    base += ("schedule=sync", "schedule.auto=false", "schedule.tsp.batch=1")
    offload = "model.gradient_checkpointing=offload"

    def host(*words: str) -> float:
        composed = settle_run(loaded(*base, *words), PlannerAdvisor())
        costing = costing_of(composed)
        (gib,) = costing.host_gib(
            candidate_of(composed.settings, 4, 4, costing.work.trained_steps)
        ).values()
        assert (
            f"memory    host: {gib:.1f} GiB (off-loaded activations, weights, evaluations)"
            in memory_lines(composed, 4, 4)
        )
        return gib

    work = costing_of(loaded(*base)).work
    version = 2 * work.trained_parameters / 2**30
    drawn = drawn_of(loaded(*base).settings)
    assert drawn is not None
    pictures = 2 * drawn.prompts * drawn.samples * work.height * work.width * 3 / 2**30
    assert host("~callbacks.evaluation") == pytest.approx(2 * version), "4 rollouts share one"
    assert host("~callbacks.evaluation", "schedule.async_steps=1") == pytest.approx(5 * version)
    assert host() == pytest.approx(2 * version + pictures)
    version = 2 * version + pictures  # what does not depend on the activations
    rows = loaded(*base).settings.sampling.task_size * work.passes
    waiting = 4 * work.sizes["blocks"] * kept_bytes(work, "all", rows) / 2**30
    assert host(offload) == pytest.approx(version + waiting)
    node = "+hardware.pools.h100.host_gib={}".format
    assert host(offload, node(1.2 * (version + waiting))) == pytest.approx(version + waiting)
    with pytest.raises(ValueError, match=r"on its host: set model\.gradient_checkpointing=auto\.$"):
        settle_run(loaded(*base, offload, node(1.1 * (version + waiting))), PlannerAdvisor())


def test_stored_prompts_cost_no_step_anything() -> None:
    """Neither time nor, in the bound, work; without a store every step encodes its prompts."""
    seconds, bounds = {}, {}
    for store in ("auto", "null"):
        costing = costing_of(
            loaded(
                "experiment=flux1_flowgrpo", "hardware=node_8xh100", f"data.prompt_store={store}"
            )
        )
        seconds[store] = (
            costing.build_cluster(costing.make_candidate(4, 4)).ranks[-1].encode_seconds
        )
        bounds[store] = step_bound(costing)
    assert seconds["auto"] == 0.0 < seconds["null"]
    assert bounds["auto"] < bounds["null"]


def test_a_plan_says_of_a_configuration_what_its_run_says() -> None:
    """For 16 drawn configurations the plan's verdict and memory are those of the run that starts."""
    drawn, refused = random.Random(30), 0
    choices = {
        "experiment": ("wan21_flowgrpo", "hunyuanvideo_dancegrpo", "wan21_dancegrpo"),
        "hardware": ("testbed_a", "testbed_b", "testbed_c", "l40x32", "node_8xh100"),
        "schedule": ("sync", "gap", "gap_tsp_tag"),
        "allocation.trainers": ("2", "4", "7"),
        "allocation.rollouts": ("1", "auto"),
        "parallel.sharding": ("auto", "ddp", "fsdp"),
        "schedule.tsp.batch": ("auto", "1", "9"),
        "model.gradient_checkpointing": ("auto", "false"),
        "hardware.emulate": ("false", "true"),
    }
    for _ in range(16):
        words = [f"{key}={drawn.choice(values)}" for key, values in choices.items()]
        composed = loaded(*words, "data.prompts_per_batch=4", "data.group_size=12")
        try:
            run = settle_run(composed, PlannerAdvisor())
        except ValueError as error:
            refused += 1
            with pytest.raises(ValueError, match=re.escape(str(error))):
                as_configured(composed)
            continue
        asked = as_configured(composed)
        split = run.settings.allocation.trainers, run.settings.allocation.rollouts
        assert (asked.candidate.trainers, asked.candidate.rollouts) == split, words
        lines = PlannerAdvisor().memory_lines(run, *split)
        for role, gib in memory_by_role(asked).items():
            near = {
                f"memory    {role}: {gib + off:.1f} GiB" for off in (-5e-4, 5e-4)
            }  # rounded twice
            assert any(line.startswith(tuple(near)) for line in lines), words
    assert 2 <= refused <= 14


def test_an_emulated_misfit_is_refused_like_a_real_one() -> None:
    words = (
        "experiment=flux1_mixgrpo",
        "hardware=testbed_b",
        "hardware.emulate=true",
        "schedule=gap",
        "parallel.sharding=ddp",
    )
    with pytest.raises(ValueError, match=r"needs .* of 71\.1 GiB .*: set parallel\.sharding=fsdp"):
        settle_run(loaded(*words), PlannerAdvisor())
    run = settle_run(loaded(*words, "hardware.pools.b.memory_gib=300"), PlannerAdvisor())
    assert run.settings.parallel.sharding == "ddp"
