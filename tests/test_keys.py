"""I11: randomness is a function of what it is for."""

from __future__ import annotations

import numpy as np
import torch

from digenrl import keys


def test_noise_does_not_depend_on_the_batch_it_is_drawn_in() -> None:
    whole = keys.noise(3, 5, 99, range(4), 2, (2, 3))
    single = keys.noise(3, 5, 99, [2], 2, (2, 3))
    assert whole.shape == (4, 2, 3)
    assert whole.dtype == torch.float32
    assert torch.equal(whole[2:3], single)


def test_every_part_of_the_key_matters() -> None:
    base = (3, 5, 99, 1, 2, "rollout")
    streams = {}
    for index, change in enumerate((4, 6, 98, 2, 3, "pairs")):
        key = [*base]
        key[index] = change
        seed, step, uid, sample, denoise_step, stream = key
        streams[index] = keys.noise(seed, step, uid, [sample], denoise_step, (64,), stream)
    streams[-1] = keys.noise(3, 5, 99, [1], 2, (64,))
    values = list(streams.values())
    for i, a in enumerate(values):
        for b in values[i + 1 :]:
            assert abs(float(torch.corrcoef(torch.cat([a, b]))[0, 1])) < 0.5


def test_the_initial_noise_has_a_number_that_no_step_has() -> None:
    assert keys.INITIAL == -1, "a run goes on with the noise that it began with"


def test_seeds_above_32_bits_do_not_collide() -> None:
    """torch's CPU generator keeps 32 bits of a seed; uids have 63."""
    assert not torch.equal(
        keys.noise(0, 0, 7, [0], 0, (8,)), keys.noise(0, 0, 7 + 2**32, [0], 0, (8,))
    )


def test_concatenated_parts_do_not_collide() -> None:
    assert not np.array_equal(keys.generator(1, 23).random(4), keys.generator(12, 3).random(4))
    assert not np.array_equal(keys.generator(1, "2").random(4), keys.generator(1, 2).random(4))


def test_noise_is_standard_normal() -> None:
    z = keys.noise(0, 0, 0, range(8), keys.INITIAL, (20_000,)).double()
    assert abs(float(z.mean())) < 0.01
    assert abs(float(z.std()) - 1) < 0.01
    assert abs(float((z**4).mean()) - 3) < 0.1
