"""A training script of flow_grpo's own: `DIR SCRIPT [flops] ...`, of which the last are its words.

DIR is a checkout of it, SCRIPT `train_sd3` or `train_flux`. Its scripts write 128 T5 tokens; here
they are as many as a tiny build of ours takes, so that both work on one length.

With `flops` the script ends after one iteration, between its first two evaluations. The last line
of its output is a JSON list of the FLOPs that it executed to generate and to train, without
encoding, decoding and evaluating.
"""

import contextlib
import functools
import importlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from digenrl.models.tiny import TEXT_LENGTH

sources, script = Path(sys.argv.pop(1)), sys.argv.pop(1)
counts = sys.argv[1] == "flops"
del sys.argv[1 : 1 + counts]
sys.path.insert(0, str(sources))
family = script.removeprefix("train_")
texts: Any = importlib.import_module(f"flow_grpo.diffusers_patch.train_dreambooth_lora_{family}")
samplers: Any = importlib.import_module(f"flow_grpo.diffusers_patch.{family}_pipeline_with_logprob")
encode_prompt, sample = texts.encode_prompt, samplers.pipeline_with_logprob
counter = FlopCounterMode(display=False)
apart = {"generate": 0, "encode": 0, "decode": 0}
"""FLOPs of each, once the counting has begun; `generate` includes `decode`."""


def counted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work`, whose FLOPs are taken down under `name`."""

    @functools.wraps(work)
    def wrapped(*given: Any, **named: Any) -> Any:
        before = counter.get_total_flops()
        made = work(*given, **named)
        apart[name] += counter.get_total_flops() - before
        return made

    return wrapped


def encode(encoders: Any, tokenizers: Any, prompt: Any, length: int) -> Any:
    """Encode as the original does, to another length."""
    return encode_prompt(encoders, tokenizers, prompt, TEXT_LENGTH)


def generate(*given: Any, **named: Any) -> Any:
    """Sample as the original does. The first sampling that is no evaluation begins the count; the
    next evaluation ends it, and the script."""
    begun = bool(apart["generate"])
    if named["noise_level"] == 0 and begun:
        counter.__exit__(None, None, None)
        training = counter.get_total_flops() - apart["generate"] - apart["encode"]
        print(json.dumps([apart["generate"] - apart["decode"], training]), flush=True)
        sys.exit()
    if named["noise_level"] and not begun:
        counter.__enter__()
    return counted("generate", sample)(*given, **named)


texts.encode_prompt = encode
if counts:
    texts.encode_prompt = counted("encode", encode)
    samplers.pipeline_with_logprob = generate
    AutoencoderKL.decode = counted("decode", AutoencoderKL.decode)
with sdpa_kernel(SDPBackend.MATH) if counts else contextlib.nullcontext():
    runpy.run_path(str(sources / "scripts" / f"{script}.py"), run_name="__main__")
