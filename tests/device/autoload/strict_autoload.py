"""Entry point `torch.backends`: with this folder on the path, `import torch` brings the device."""


def load() -> None:
    """Register the device, unless the process only builds it."""
    from tests.device import strict  # noqa: F401
