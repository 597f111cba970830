"""Encode the prompts of a run into the prompt store, so that the run itself moves no text encoder.

    digenrl encode experiment=... hardware=... [data.prompt_store=DIR] [key=value ...]

What is in the store already stays. The last line on standard output is the store's directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from digenrl import config as configuration


def main(words: Sequence[str]) -> int:
    """Run the command and return the exit code: 0 for success, 1 for a store that cannot be
    written.

    2 stands for a configuration that does not fit, or that has nothing to encode.
    """
    config = configuration.load_or_exit(words, doc=__doc__).config
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the ranks of a run: the same bits

    import torch

    from digenrl.data import PromptData
    from digenrl.extensions.store.filling import fill_prompt_store

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    policy = configuration.instantiate(config.model)
    callbacks = [
        configuration.instantiate(callback) for callback in (config.callbacks or {}).values()
    ]
    try:
        filled = fill_prompt_store(config, policy, PromptData(config.data, config.seed), callbacks)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    if filled is None:
        print(
            f"nothing to encode: data.prompt_store = {config.data.prompt_store}, and the model is "
            f"{policy.family}; set data.prompt_store=auto, and choose a model with text encoders.",
            file=sys.stderr,
        )
        return configuration.EXIT_CODE
    print(
        f"{filled.texts} texts, {filled.encoded} encoded, {filled.texts - filled.encoded} reused",
        file=sys.stderr,
    )
    print(filled.root)
    return 0
