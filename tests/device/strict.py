"""The device type "strict" (see strict.cpp), and `torch.strict`, its counterpart of `torch.cuda`.

Importing this module registers both. Processes of the tests get it from `import torch`, through the
entry point in `autoload/`.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.device import build

_C = build.load()
torch.utils.rename_privateuse1_backend("strict")


def is_available() -> bool:
    return _C.device_count() > 0


def is_initialized() -> bool:
    return _C.is_initialized()


def _lazy_init() -> None:
    _C.init()


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def _index(given=None) -> int:
    if given is None:
        return _C.current_device()
    found = torch.device("strict", given) if isinstance(given, int) else torch.device(given)
    if found.type != "strict":
        raise ValueError(f"Expected a strict device, but got: {found}")
    return _C.current_device() if found.index is None else found.index


def set_device(given) -> None:
    _C.set_device(_index(given))


class device:
    def __init__(self, given) -> None:
        self._index = _index(given)

    def __enter__(self):
        self._before = _C.current_device()
        _C.set_device(self._index)

    def __exit__(self, *_):
        _C.set_device(self._before)


def Stream(device=None, priority=0, **_):
    return torch.Stream(device=torch.device("strict", _index(device)), priority=priority)


def Event(enable_timing=False, blocking=False, interprocess=False):
    return torch.Event(device="strict", enable_timing=enable_timing)


def current_stream(device=None):
    return torch.accelerator.current_stream(torch.device("strict", _index(device)))


def set_stream(given) -> None:
    torch.accelerator.set_stream(given)


class stream:
    def __init__(self, given) -> None:
        self._stream = given

    def __enter__(self):
        if self._stream is not None:
            self._before = current_stream(self._stream.device)
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_):
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)


def synchronize(device=None) -> None:
    torch.accelerator.synchronize(torch.device("strict", _index(device)))


def get_device_properties(device=None):
    _C.init()
    number = _index(device)
    return SimpleNamespace(
        name="Strict accelerator",
        total_memory=_C.memory(number)[2],
        uuid=f"strict-{number}",
        major=9,
        minor=0,
        multi_processor_count=1,
    )


def get_device_name(device=None) -> str:
    return "Strict accelerator"


def get_device_capability(device=None):
    return (9, 0)


def mem_get_info(device=None):
    used, _, all_of_it = _C.memory(_index(device))
    return all_of_it - used, all_of_it


def memory_allocated(device=None) -> int:
    return _C.memory(_index(device))[0]


def max_memory_allocated(device=None) -> int:
    return _C.memory(_index(device))[1]


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(device=None) -> None:
    _C.reset_peak(_index(device))


def empty_cache() -> None:
    pass


def get_rng_state(device="strict"):
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state, device="strict") -> None:
    _C.default_generator(_index(device)).set_state(state)


def get_rng_state_all():
    return [get_rng_state(number) for number in range(device_count())]


def set_rng_state_all(states) -> None:
    for number, state in enumerate(states):
        set_rng_state(state, number)


def manual_seed(seed: int) -> None:
    _C.default_generator(_C.current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for number in range(device_count()):
        _C.default_generator(number).manual_seed(seed)


def initial_seed() -> int:
    return _C.default_generator(_C.current_device()).initial_seed()


def _is_in_bad_fork() -> bool:
    return _C.bad_fork()


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


class _Generators:
    def __getitem__(self, number):
        return _C.default_generator(number)


default_generators = _Generators()
amp = SimpleNamespace()
calls, hide, set_op_us = _C.calls, _C.hide, _C.set_op_us

torch._register_device_module("strict", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_storage=True
)


_Backend = torch._C._distributed_c10d.Backend
if not hasattr(_Backend, "set_timeout"):  # before torch 2.15 the base had neither name
    _Backend._set_default_timeout = lambda self, timeout: None


def _collectives(store, rank, size, timeout):
    return _C.wrap_backend(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


dist.Backend.backend_capability["gloo"].append("strict")  # it may stand beside, as beside NCCL
dist.Backend.register_backend("stccl", _collectives, devices=["strict"])


def _bound(begin):
    """NCCL of torch 2.15 binds a group to one device: where nobody names one, to that of the rank's
    number in it."""

    @functools.wraps(begin)
    def init_process_group(backend=None, *args, device_id=None, **facts):
        own = torch.device("strict", torch.accelerator.current_device_index())
        if backend != "gloo" and device_id != own:
            raise RuntimeError(f"device_id of the default group is {device_id}, and not {own}")
        begin(backend, *args, **facts)  # without: this backend splits no group

    return init_process_group


dist.init_process_group = _bound(dist.init_process_group)
