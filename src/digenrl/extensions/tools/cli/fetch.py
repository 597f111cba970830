"""`make fetch EXP=...`: download what an experiment needs, and nothing else.

    digenrl fetch experiment=... [hardware=...] [prompts=NAME] [list=true] [key=value ...]

Base model, reward models and statistics come from the hub into its cache (HF_HOME moves it). Sizes
and licences are said first. An interrupted download goes on where it stopped. A file that is there
in its size is skipped. `list=true` prints the commands for a machine with a network instead. The
last line on standard output has the settings that the run needs beside yours, if any.
"""

from __future__ import annotations

import shutil
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from digenrl import config as configuration
from digenrl.config.help import Arguments, own_command
from digenrl.config.words import shell_word
from digenrl.extensions.tools.downloads import Download, find_downloads
from digenrl.extensions.tools.published import SETS, check_files

_GB = 1e9


class FetchKeys(Arguments):
    """Keys that the command has beside the keys of a run."""

    list: bool = False
    """Print what would be downloaded, and download nothing."""
    prompts: str | None = None
    """Published prompt set (docs/data.md) to fetch into prompts/NAME, if it is not there."""


def main(words: Sequence[str]) -> int:
    """Exit code: 0; 2 when the configuration does not fit, or something cannot be fetched."""
    given = ["list=true" if word == "--list" else word for word in words]
    return own_command(FetchKeys, __doc__, given, _fetch_needed, others=True)


def _fetch_needed(request: FetchKeys, words: list[str]) -> None:
    from huggingface_hub import constants

    if request.prompts not in (None, *SETS):
        raise ValueError(f"prompts = {request.prompts}: no such set; there are {', '.join(SETS)}.")
    wanted, elsewhere = find_downloads(configuration.load(words).settings)
    for line in elsewhere:
        print(f"not from the hub: {line}", file=sys.stderr)
    if request.list:
        for each in wanted:
            print(f"{each.key}: licence at {each.page}", file=sys.stderr)
            print(each.command)
        name = request.prompts
        for source in SETS[name].sources if name else ():
            print(f"curl -fL --create-dirs -o prompts/{name}/{source.name} {source.address}")
        return
    if constants.HF_HUB_OFFLINE and wanted:
        raise ValueError(
            "HF_HUB_OFFLINE is set: unset it to download, or take list=true, which prints the "
            "commands for another machine."
        )
    _require_room(sum(_announce_download(each) for each in wanted))
    settings = [_download_files(each) for each in wanted]
    if request.prompts is not None:
        settings.append(_download_prompts(request.prompts))
    print(" ".join(filter(None, settings)) or "Everything is here.")


def _announce_download(wanted: Download) -> int:
    """Say the size and the licence of a download; return the bytes that are not here yet.

    A cached file of another size than the hub's is removed.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    try:
        info = HfApi().model_info(wanted.repository, files_metadata=True)
        files = snapshot_download(
            wanted.repository,
            allow_patterns=list(wanted.files),
            ignore_patterns=list(wanted.ignored),
            dry_run=True,
        )
    except GatedRepoError as error:
        raise ValueError(
            f"{wanted.key} = {wanted.repository} is gated: accept its licence at {wanted.page}, "
            "then `hf auth login` with a token of that account."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{wanted.key} = {wanted.repository}: the hub does not list it ({reason}); see "
            f"{wanted.page}, or take list=true on a machine without a network."
        ) from error
    if not files:
        raise ValueError(f"{wanted.key}: {wanted.repository} has none of {wanted.files}.")
    # Of a cached file the dry run tells the size that it has here.
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    absent = [
        file for file in files if not _is_whole(Path(file.local_path), sizes.get(file.filename))
    ]
    whole, missing = (
        sum(sizes.get(file.filename) or file.file_size or 0 for file in part)
        for part in (files, absent)
    )
    card = info.card_data
    licence = (card and (card.get("license_name") or card.get("license"))) or "see its page"
    gated = ", gated: accept it there" if info.gated else ""
    print(
        f"{wanted.repository}: {len(files)} files, {whole / _GB:.2f} GB, {missing / _GB:.2f} to "
        f"download; licence {licence} ({wanted.page}{gated})",
        file=sys.stderr,
    )
    return missing


def _is_whole(path: Path, size: int | None) -> bool:
    """Return whether a cached file is there in its size; one of another size is removed."""
    if not path.exists():
        return False
    if size is None or path.stat().st_size == size:
        return True
    print(f"{path.name}: {path.stat().st_size} bytes instead of {size}: again", file=sys.stderr)
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    return False


def _require_room(missing: int) -> None:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise ValueError(
            f"{missing / _GB:.1f} GB to download, {free / _GB:.1f} GB free in {place}: set HF_HOME "
            "to a directory with room."
        )


def _download_files(wanted: Download) -> str:
    """Download; return the setting that names the file, if the configuration does not name it."""
    from huggingface_hub import snapshot_download

    patterns, left_out = list(wanted.files), list(wanted.ignored)
    folder = Path(
        snapshot_download(wanted.repository, allow_patterns=patterns, ignore_patterns=left_out)
    )
    return shell_word(wanted.key, folder / wanted.files[0]) if wanted.to_set else ""


def _download_prompts(name: str) -> str:
    """Download the files of a published prompt set that are not here; return its settings."""
    folder = Path("prompts") / name
    folder.mkdir(parents=True, exist_ok=True)
    for source in SETS[name].sources:
        if not (folder / source.name).exists():
            part = folder / f"{source.name}.part"
            urllib.request.urlretrieve(source.address, part)
            part.replace(folder / source.name)
    *about, settings = check_files(SETS[name], folder)
    print("\n".join(about), file=sys.stderr)
    return settings
