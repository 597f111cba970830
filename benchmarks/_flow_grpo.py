"""flow_grpo's own training script, from the directory in the first argument; the other arguments
are its own.

Its script writes 128 T5 tokens; here they are as many as a tiny build of ours takes, so that both
work on one length.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from digenrl.extensions.tiny.builds import TEXT_LENGTH

sources = Path(sys.argv.pop(1))
sys.path.insert(0, str(sources))
from flow_grpo.diffusers_patch import train_dreambooth_lora_sd3 as texts  # noqa: E402

encode_prompt = texts.encode_prompt


def encode(encoders: Any, tokenizers: Any, prompt: Any, length: int) -> Any:
    """As the original, of another length."""
    return encode_prompt(encoders, tokenizers, prompt, TEXT_LENGTH)


texts.encode_prompt = encode
runpy.run_path(str(sources / "scripts" / "train_sd3.py"), run_name="__main__")
