"""What the strict device promises: each of its checks is seen to fail what it must fail, and to
pass what a GPU passes. Runs in a process that has the device."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

DEVICE = torch.device("strict", 0)
strict = torch.get_device_module("strict")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A test ends with nothing under way; what it left unordered is its own."""
    yield
    gc.collect()
    gc.freeze()  # the next collection need not look through all that has been imported
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        torch.accelerator.synchronize()


def ones(*shape: int, device: torch.device | str = DEVICE) -> torch.Tensor:
    return torch.ones(*shape, device=device)


# ---- placement -------------------------------------------------------------------------------

MIXED: dict[str, Callable[[], Any]] = {
    "two devices": lambda: ones(2) + ones(2, device="strict:1"),
    "cat": lambda: torch.cat([ones(3), torch.ones(3)]),
    "where": lambda: torch.where(torch.ones(3) > 0, ones(3), ones(3)),
    "in place": lambda: ones(3).add_(torch.ones(3)),
    "in place on the CPU": lambda: torch.ones(3).add_(ones(3)),
    "matrices": lambda: torch.ones(2, 2) @ ones(2, 2),
    "gather": lambda: ones(2, 2).gather(0, torch.zeros(1, 2, dtype=torch.long)),
    "embedding": lambda: F.embedding(torch.zeros(1, dtype=torch.long), ones(3, 3)),
    "convolution": lambda: F.conv2d(ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)),
    "attention": lambda: F.scaled_dot_product_attention(*(ones(1, 1, 2, 4), ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))),
    "layer norm": lambda: F.layer_norm(ones(2, 3), (3,), torch.ones(3)),
    "foreach": lambda: torch._foreach_add([ones(3)], [torch.ones(3)]),
    "an index of the device on the CPU": lambda: torch.ones(3)[torch.zeros(1, dtype=torch.long, device=DEVICE)],
    "numpy": lambda: ones(3).numpy(),
    "backward": lambda: ones(3).requires_grad_().mul(2).backward(torch.ones(3)),
    "a gradient on the CPU": lambda: setattr(nn.Parameter(ones(3)), "grad", torch.ones(3)),
    "pinning": lambda: ones(3).pin_memory(),
    "an invalid number": lambda: ones(1, device="strict:7"),
    "the CPU's generator": lambda: torch.randn(3, device=DEVICE, generator=torch.Generator()),
    "its generator on the CPU": lambda: torch.randn(3, generator=torch.Generator(DEVICE)),
}  # fmt: skip


@pytest.mark.parametrize("what", MIXED)
def test_mixing_devices_raises(what: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"strict|device|dense CPU"):
        MIXED[what]()


def test_what_a_gpu_allows_passes() -> None:
    x = ones(3)
    assert (x + torch.tensor(1.0)).device == DEVICE
    assert x[torch.zeros(1, dtype=torch.long)].device == DEVICE
    assert (torch.tensor(2.0) * x).tolist() == [2.0, 2.0, 2.0]
    x[torch.tensor([0])] = 5.0
    assert x.tolist() == [5.0, 1.0, 1.0]


def test_a_read_of_its_memory_by_the_host_faults_with_a_stack() -> None:
    code = "import ctypes, torch\ndef reads():\n    ctypes.string_at(torch.ones(3, device='strict').data_ptr(), 4)\nreads()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -11
    assert "Segmentation fault" in done.stderr
    assert "in reads" in done.stderr


# ---- arithmetic ------------------------------------------------------------------------------


def trained(
    device: str, dtype: torch.dtype | None = None
) -> tuple[list[torch.Tensor], list[float]]:
    """(parameters, losses) of three steps of a small network, from the same start."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(144, 8),
        nn.LayerNorm(8),
        nn.GELU(),
    )
    given = torch.randn(5, 1, 8, 8).to(device)
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            out = net(given)
        loss = out.float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [parameter.detach().cpu() for parameter in net.parameters()], losses


def test_training_is_the_cpus_to_the_bit() -> None:
    there, here = trained("cpu"), trained("strict")
    assert there[1] == here[1]
    assert all(torch.equal(a, b) for a, b in zip(there[0], here[0], strict=True))


def test_autocast_lowers_products_and_keeps_norms() -> None:
    """The strict device does as a GPU. The CPU's autocast leaves norms in bf16, so results agree
    only to bf16."""
    there, here = trained("cpu", torch.bfloat16), trained("strict", torch.bfloat16)
    assert there[1] == pytest.approx(here[1], rel=2e-2)
    with torch.autocast("strict", dtype=torch.bfloat16):
        assert (ones(2, 2) @ ones(2, 2)).dtype == torch.bfloat16
        assert F.layer_norm(ones(2, 2).bfloat16(), (2,)).dtype == torch.float32


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_one_kernel_that_keeps_no_matrix_of_tokens(masked: bool) -> None:
    """Memory grows with the tokens, not with their square, as on a GPU. The numbers are the CPU's."""
    torch.manual_seed(0)
    given = torch.randn(3, 1, 2, 512, 8)
    mask = torch.rand(512, 512) > 0.3 if masked else None
    found = {}
    for device in ("cpu", "strict"):
        mine = given.to(device, copy=True).requires_grad_()
        hidden = None if mask is None else mask.to(device)
        before = strict.memory_allocated()
        strict.reset_peak_memory_stats()
        out = F.scaled_dot_product_attention(*mine, attn_mask=hidden)
        out.square().sum().backward()
        assert mine.grad is not None
        found[device] = out.detach().cpu(), mine.grad.cpu()
    assert all(torch.equal(*pair) for pair in zip(*found.values(), strict=True))
    assert strict.max_memory_allocated() - before < 2 * 512 * 512 * 4


def test_conjugates_and_negatives_are_copied() -> None:
    """torch's fallback for them copies by a copy, without end: the rotation of Qwen-Image's tokens
    overflowed the stack."""
    x = torch.tensor([1 + 2j, 3 - 1j])
    for here in (x.conj(), x.conj().imag):
        there = x.to(DEVICE).conj() if here.is_complex() else x.to(DEVICE).conj().imag
        assert torch.equal(there.clone().cpu(), here)
        assert torch.equal(there.cpu(), here)


def test_compiled_code_runs_with_aot_eager() -> None:
    layer = nn.Linear(3, 3).to(DEVICE)
    given = ones(2, 3).requires_grad_()
    compiled = torch.compile(lambda x: layer(x).sin().sum(), backend="aot_eager")
    compiled(given).backward()
    assert given.grad is not None
    mine, given.grad = given.grad, None
    layer(given).sin().sum().backward()
    assert torch.equal(mine, given.grad)


def test_recomputed_activations_have_their_random_numbers() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(DEVICE)
    given = torch.randn(2, 4, device=DEVICE, requires_grad=True)
    torch.manual_seed(1)
    layers(given).sum().backward()
    kept, given.grad = given.grad, None
    torch.manual_seed(1)
    checkpoint(layers, given, use_reentrant=False).sum().backward()
    assert torch.equal(kept, given.grad)


def test_files(tmp_path: Path) -> None:
    x = torch.randn(4, 5, device=DEVICE)
    buffer = io.BytesIO()
    torch.save(x.t(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu", weights_only=True).equal(x.cpu().t())
    save_file({"x": x}, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["x"].equal(x.cpu())


# ---- generators ------------------------------------------------------------------------------


def test_its_random_numbers_are_its_own() -> None:
    drawn = [
        torch.randn(4, device=device, generator=torch.Generator(device).manual_seed(1)).cpu()
        for device in ("cpu", "strict", "strict")
    ]
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[1], drawn[2])
    torch.manual_seed(3)
    first, state = torch.randn(2, device=DEVICE).cpu(), strict.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(2, device=DEVICE).cpu())
    following = torch.randn(2, device=DEVICE).cpu()
    strict.set_rng_state(state)
    assert torch.equal(following, torch.randn(2, device=DEVICE).cpu())


# ---- forks -----------------------------------------------------------------------------------


def test_a_process_that_has_used_it_may_not_fork() -> None:
    """One that has only counted devices may: the ranks of test_runs.py are its forks."""
    program = (
        "import os, torch\n"
        "assert torch.accelerator.device_count() >= 2\n"
        "torch.ones(1, device='strict')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    torch.ones(1, device='strict')\n"
        "    os._exit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "forked subprocess" in done.stderr


# ---- memory ----------------------------------------------------------------------------------


def test_each_device_counts_its_bytes_and_has_a_limit() -> None:
    before = strict.memory_allocated(0), strict.memory_allocated(1)
    torch.accelerator.reset_peak_memory_stats(1)
    x = torch.empty(1 << 20, dtype=torch.uint8, device="strict:1")
    y = torch.empty(1 << 20, dtype=torch.uint8, device="strict:1")
    assert torch.accelerator.memory_allocated(1) == before[1] + (2 << 20)
    del x, y
    assert (strict.memory_allocated(0), strict.memory_allocated(1)) == before
    assert torch.accelerator.max_memory_allocated(1) == before[1] + (2 << 20)
    _, total = strict.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match="strict out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device=DEVICE)


def test_fresh_memory_has_no_numbers() -> None:
    assert torch.empty(4, device=DEVICE).isnan().all()
    assert torch.empty(4, pin_memory=True).isnan().all()


# ---- copies and streams ----------------------------------------------------------------------


def test_a_copy_that_nobody_waits_for_has_not_happened() -> None:
    host = torch.zeros(3, pin_memory=True)
    host.copy_(ones(3), non_blocking=True)
    assert host.tolist() == [0, 0, 0]
    torch.accelerator.synchronize()
    assert host.tolist() == [1, 1, 1]
    there = host.to(DEVICE, non_blocking=True)
    host.fill_(7)
    assert there.tolist() == [7, 7, 7], "the source was written too early"
    assert ones(3).to("cpu", non_blocking=True).isnan().all()


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream(DEVICE)


def test_streams_without_an_order_are_found(side: torch.Stream) -> None:
    x = ones(3)
    with side, pytest.raises(RuntimeError, match=r"uses what stream 0 .* writes, without waiting"):
        x * 2


def test_streams_in_order_pass(side: torch.Stream) -> None:
    x, own = ones(3), torch.accelerator.current_stream()
    side.wait_stream(own)
    with side:
        y = x * 2
    x.record_stream(side)
    event = torch.Event(DEVICE)
    event.record(side)
    own.wait_event(event)
    y.record_stream(own)
    assert (y + 1).tolist() == [3, 3, 3]


def test_a_write_of_what_another_stream_reads_is_found(side: torch.Stream) -> None:
    x = ones(3)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 2
    with pytest.raises(RuntimeError, match=r"writes what stream \d+ .* uses, without waiting"):
        x.zero_()
    del y


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_uses_is_not_given_again(
    side: torch.Stream, recorded: bool
) -> None:
    x, host = ones(300), torch.empty(300, pin_memory=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    if recorded:
        x.record_stream(side)
    del x
    if recorded:
        ones(300)
    else:
        with pytest.raises(RuntimeError, match="no record_stream"):
            ones(300)
    side.synchronize()
    assert host.sum() == 300


def test_work_takes_time_on_its_stream_and_none_of_the_hosts() -> None:
    x, (began, ended) = ones(3), (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize()
    strict.set_op_us(20_000)
    try:
        start = time.perf_counter()
        began.record()
        for _ in range(5):
            x.add_(1)
        ended.record()
        launched = time.perf_counter() - start
        ended.synchronize()
        waited = time.perf_counter() - start
    finally:
        strict.set_op_us(0)
    assert launched < 0.05
    assert waited >= 0.1
    assert began.elapsed_time(ended) >= 100


# ---- collectives -----------------------------------------------------------------------------


def test_its_process_group_takes_its_tensors_alone(tmp_path: Path) -> None:
    dist.init_process_group(
        "cpu:gloo,strict:stccl",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        device_id=torch.device("strict", 0),
    )
    try:
        x = ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1, 1]
        gathered = ones(2, 3).zero_()
        dist.all_gather_into_tensor(gathered[0], x)
        assert gathered[0].tolist() == [1, 1, 1]
        dist.all_reduce(torch.ones(3))
        own = dist.new_group(backend="stccl")
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(3), group=own)
    finally:
        dist.destroy_process_group()


def test_this_process_has_the_device_because_it_imported_torch() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("strict")
    assert "STRICT_TESTS" in os.environ
