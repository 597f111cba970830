"""Keys and values that earlier versions had: what replaces each, or why it went."""

REMOVED: dict[str, str] = {
    "model.compile=graphs": "torch.compile's own mode does what it did; set model.compile=true",
}
"""Dotted key, or key=value, -> the end of the line that refuses it."""
