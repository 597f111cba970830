"""Lines between pools that do not fit the hardware profile are refused."""

from __future__ import annotations

import pytest

from digenrl import config

WAN = "{between:[a,b],gb_s:1.0}"
KEYS = "gpu:cpu,memory_gib:8,tflops:0.1,hbm_tb_s:0.1,intra_gb_s:1,inter_gb_s:1"
POOLS = [f"+hardware.pools.{name}={{{KEYS}}}" for name in "ab"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["+hardware.links={wan:{between:[local,far],gb_s:1.0}}"],
            ["hardware.links.wan.between = ['local', 'far']", "two pools", "its pools are local"],
        ),
        (
            [*POOLS, f"+hardware.links={{wan:{WAN},lan:{WAN}}}"],
            ["hardware.links.lan: joins the pools of hardware.links.wan"],
        ),
    ],
)
def test_a_line_joins_two_pools_once(words: list[str], expected: list[str]) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load(words)
    assert any(all(part in text for part in expected) for text in caught.value.problems)
