"""Small tasks for a laptop: digits, drawn scenes, edits, a mixture of Gaussians."""

from digenrl.cli.commands import Command

COMMANDS = {
    "pretrain": Command(
        "digenrl.extensions.tasks.cli.pretrain",
        "train the digits base model and its judges again, into the committed files",
    ),
    "pretrain-scenes": Command(
        "digenrl.extensions.tasks.cli.pretrain_scenes",
        "train the scenes base model and its judge again, into the committed files",
    ),
}
