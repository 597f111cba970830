"""Another way to send weights than plain sockets: broadcasts of torch.distributed."""

from digenrl.extensions.links.settings import line_problems, publication_problems

RULES = (publication_problems, line_problems)
