"""Prompt sets that others have published: the place of each file, and a check of its content.
Standard library only.

The user downloads the files, and this repository holds none. A file is known by the name that git
gives its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.words import shell_word
from digenrl.prompts import PromptFileError, read_prompt_file


@dataclass(frozen=True)
class PublishedSource:
    """File of a public repository."""

    repository: str
    commit: str
    path: str
    blob: str
    """Object id of the content in git: SHA-1 over "blob SIZE", a NUL and the bytes."""

    @property
    def address(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"

    @property
    def name(self) -> str:
        return Path(self.path).name


@dataclass(frozen=True)
class PublishedSet:
    """Training prompts, and prompts of the evaluation if there are any."""

    train: PublishedSource
    heldout: PublishedSource | None = None

    @property
    def sources(self) -> tuple[PublishedSource, ...]:
        return (self.train, self.heldout) if self.heldout else (self.train,)


def _flow_grpo(path: str, blob: str) -> PublishedSource:
    return PublishedSource(
        "yifan123/flow_grpo", "ac4c86e8cae021841f1fde853d340e0db67690dd", f"dataset/{path}", blob
    )


_MIX_GRPO = ("Tencent-Hunyuan/MixGRPO", "e5cdd6a427778d8c8b2e7a48ce16972141adbe7c")
_DANCE_GRPO = ("XueZeyue/DanceGRPO", "15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344")
SETS = {
    "pickscore": PublishedSet(
        _flow_grpo("pickscore/train.txt", "a437bd921c03fbc00c4e7ce148ae2d28fcd6e49b"),
        _flow_grpo("pickscore/test.txt", "45f05231b969fb5f74c8debd606b22cd3be27f8e"),
    ),
    "ocr": PublishedSet(
        _flow_grpo("ocr/train.txt", "3ce0521b77b0a9031191d66ecc36ebaaf27a3922"),
        _flow_grpo("ocr/test.txt", "8deb4f8d8f2e863f45353354243669b3c991a6a2"),
    ),
    "geneval": PublishedSet(
        _flow_grpo("geneval/train_metadata.jsonl", "0b97e8a6802c08fc7537cd00c76ae79c851bddcb"),
        _flow_grpo("geneval/test_metadata.jsonl", "27cdaf5cc1356fe15aeadbb8df55682ca74228f0"),
    ),
    "geneval_unseen": PublishedSet(
        _flow_grpo(
            "geneval_unseen_objects/train_metadata.jsonl",
            "05715c3713940177a2a20fd0575ec972a3bf2e89",
        ),
        _flow_grpo(
            "geneval_unseen_objects/test_metadata.jsonl", "d070709b18f5fb694756aa3ce9f6fba42ebcc39c"
        ),
    ),
    "images": PublishedSet(
        PublishedSource(*_MIX_GRPO, "data/prompts.txt", "b47234e475645222ca9a0bb7742ebf4d08123855"),
        PublishedSource(
            *_MIX_GRPO, "data/prompts_test.txt", "69323d42374806447d4768a257f376a7db683e07"
        ),
    ),
    "videos": PublishedSet(
        PublishedSource(
            *_DANCE_GRPO, "assets/video_prompts.txt", "2a7457f2d7b59ff7915be588de1ddb8fa95c8028"
        ),
    ),
}
"""Name -> set. Ids and paths are those of the commits named."""


def blob_id(path: Path) -> str:
    """Return the object id of a file's content in git."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def check_files(chosen: PublishedSet, folder: Path) -> Iterator[str]:
    """Yield a line about each file of the set in `folder`, then the settings that use the set.

    If training prompts are also among the held-out prompts, a copy without them is written and
    used.

    Raises:
        PromptFileError: a file is not the published one, or cannot be used.
    """
    files = {}
    for source in chosen.sources:
        path = folder / source.name
        if (found := blob_id(path)) != source.blob:
            raise PromptFileError(
                f"{path}: not the published file (git object {found[:12]}, published "
                f"{source.blob[:12]} in "
                f"{source.repository} at {source.commit[:7]}); fetch it again from {source.address}"
            )
        files[source] = read_prompt_file(path)
        yield (
            f"{path}: as published, {len(files[source].prompts)} prompts and "
            f"{len(files[source].duplicates)} repeated"
        )
    used = folder / chosen.train.name
    if chosen.heldout is None:
        yield shell_word("data.prompts", used)
        return
    both = {prompt.text for prompt in files[chosen.heldout].prompts}
    train = files[chosen.train]
    pairs = zip(train.lines, train.prompts, strict=True)
    shared = {line for line, prompt in pairs if prompt.text in both}
    if shared:
        lines = used.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        used = used.with_stem(f"{used.stem}_without_heldout")
        used.write_bytes(
            b"\n".join(line for number, line in enumerate(lines, 1) if number not in shared)
        )
        yield f"{used}: without what is held out, {len(shared)} fewer"
    heldout = folder / chosen.heldout.name
    yield f"{shell_word('data.prompts', used)} {shell_word('data.heldout', heldout)}"
