"""The 24 numerical checks of the formulas (docs/algorithms.md section 7). For each, the test, and
the place of a seeded mutation by which that test fails."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SDE, DENOISE, STEPS = (
    "diffusion/test_sde.py",
    "diffusion/test_denoise.py",
    "diffusion/test_steps.py",
)
LOSSES, ADVANTAGES = "algorithms/test_objectives.py", "algorithms/test_advantages.py"
FORWARD = "extensions/methods/test_forward_losses.py"
GRPO, SURROGATES, LEARNING = (
    "algorithms/test_grpo.py",
    "extensions/methods/test_offpolicy.py",
    "algorithms/test_learning.py",
)

CHECKS: dict[int, tuple[str, str, str]] = {
    1: (
        DENOISE,
        "test_on_policy_ratio_is_exactly_one",
        "test_check_1_fails_if_the_log_prob_is_taken_before_rounding",
    ),
    2: (LOSSES, "test_on_policy_gradient_is_the_policy_gradient", ""),
    3: (SDE, "test_noise_level_zero_is_the_euler_step", "test_check_3_can_fail"),
    4: (SDE, "test_dance_is_flow_sde_with_constant_std", "test_check_4_can_fail"),
    5: (SDE, "test_exact_pair_of_flow_sde", "test_check_5_can_fail"),
    6: (SDE, "test_marginal_is_preserved_as_steps_grow", "test_check_6_can_fail"),
    7: (SDE, "test_log_prob_is_the_mean_of_the_normal_log_density", "test_check_7_can_fail"),
    8: (
        SDE,
        "test_first_step_std_depends_on_the_guard",
        "test_replay_with_another_guard_breaks_the_ratio",
    ),
    9: (LOSSES, "test_kl_of_a_velocity_offset", ""),
    10: (
        LOSSES,
        "test_guard_log_ratio_is_centred_and_the_plain_one_is_not",
        "test_guard_gradient_does_not_depend_on_h",
    ),
    11: (LOSSES, "test_guard_ratio_per_row", ""),
    12: (LOSSES, "test_dppo_truth_table", ""),
    13: (FORWARD, "test_nft_gradient_at_the_old_policy", ""),
    14: (FORWARD, "test_dpo", ""),
    15: (ADVANTAGES, "test_equal_rewards_give_exactly_zero", "test_check_15_can_fail"),
    16: (DENOISE, "test_permuted_replay_gathers_matching_sigmas", ""),
    17: (GRPO, "test_gradient_does_not_depend_on_how_cells_are_cut", ""),
    18: ("models/test_guidance.py", "test_concatenated_guidance_equals_two_forwards", ""),
    19: (STEPS, "test_windows_cover_exactly_their_range", "test_check_19_can_fail"),
    20: ("data/test_prompts.py", "test_k_repeat_sampling_over_ranks_survives_prefetch", ""),
    21: (LEARNING, "test_reward_rises", "test_reward_falls_with_the_sign_flipped"),
    22: (SURROGATES, "test_decoupled_ppo_clips_around_the_proximal_policy_and_caps_the_weight", ""),
    23: ("algorithms/test_copies.py", "test_swap_in_and_out_restores_bits", ""),
    24: ("diffusion/test_sigmas.py", "test_static_shift_is_applied_once", ""),
}
"""number -> (file, test, the test that seeds the mutation; "" = the same one, beside the right
formula)."""


@cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    """The functions of a test file."""
    tree = ast.parse((TESTS / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("number", range(1, 25))
def test_every_check_is_tested_under_its_number(number: int) -> None:
    file, test, sensitivity = CHECKS[number]
    said = ast.get_docstring(functions(file)[test]) or ""
    module = ast.get_docstring(ast.parse((TESTS / file).read_text())) or ""
    numbers = (
        re.findall(r"\d+", said.split(":")[0])
        if said.startswith("Check")
        else re.findall(r"Check (\d+):", module)
    )
    assert str(number) in numbers
    assert (sensitivity or test) in functions(file)
