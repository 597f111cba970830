"""Write the micro-batch behind a skipped update to disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from digenrl.algorithms.finite import tensors_of
from digenrl.types import TrainBatch


def dump_to(directory: Path, rank: int = 0, keep: int = 3) -> Callable[[TrainBatch, str], None]:
    """Return a `PolicyModule.dump_batch` that writes at most `keep` batches as
    <directory>/rank<r>-version<v>-update<u>/.

    batch.safetensors holds `reward/<name>` and `<block>/<field>`; batch.json the reason and the
    scalars of each block.
    """

    def write(batch: TrainBatch, reason: str) -> None:
        if directory.is_dir() and len(list(directory.glob(f"rank{rank}-*"))) >= keep:
            return
        target = directory / f"rank{rank}-version{batch.version}-update{batch.update}"
        target.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {
            f"reward/{name}": table for name, table in batch.rewards.items()
        }
        blocks = []
        for index, block in enumerate(batch.blocks):
            fields = tensors_of(block) | {
                f"condition/{name}": value for name, value in block.condition.items()
            }
            tensors |= {f"{index}/{name}": value for name, value in fields.items()}
            blocks.append(
                {
                    name: value
                    for name, value in vars(block).items()
                    if isinstance(value, (int, float))
                }
            )
        save_file(
            {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()},
            target / "batch.safetensors",
        )
        facts = {
            "reason": reason,
            "denominator": batch.denominator,
            "reward_weights": batch.reward_weights,
        }
        (target / "batch.json").write_text(json.dumps(facts | {"blocks": blocks}, indent=1))

    return write
