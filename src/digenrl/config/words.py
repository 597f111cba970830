"""`key=value` words as Hydra reads them, for another process or a user's shell.

Hydra's grammar gives spaces, brackets, commas and quotes a meaning. These functions quote every
value that holds such a character.
"""

from __future__ import annotations

import re
import shlex

# What Hydra reads as text as it stands: no digit first, and no word of another type.
_PLAIN = re.compile(r"(?!(?i:true|false|null|nan|inf)\Z)[A-Za-z_/][\w./:@%+-]*", re.ASCII)
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_LITERAL = ("hydra.run.dir", "hydra.sweep.dir")
"""Keys whose value is a path, whatever letters it has."""


def quote_value(text: str) -> str:
    r"""Return `text` as a value that Hydra reads literally.

    >>> print(quote_value("Dropbox (Lab)"), quote_value("it's"), quote_value("ends with \\"))
    'Dropbox (Lab)' 'it\'s' 'ends with \\'
    """
    # Backslashes count only before a quote, and the closing quote is one.
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    escaped = re.sub(r"(\\+)\Z", lambda found: found[1] * 2, escaped)
    return f"'{escaped}'"


def unquote_text(held: str) -> str:
    r"""Return what a word's value means where only text is meant: without quotes around it.

    >>> unquote_text("'my run'"), unquote_text("it's"), unquote_text(r"'it\'s'")
    ('my run', "it's", "it's")
    """
    # A quote inside a text belongs to it.
    if not _QUOTED.fullmatch(held):
        return held
    inner = re.sub(rf"(\\*)\\{held[0]}", lambda found: found[1][::2] + held[0], held[1:-1])
    return re.sub(r"(\\+)\Z", lambda found: found[1][::2], inner)


def format_value(text: object) -> str:
    """Return a text as Hydra reads it, quoted only where it must be.

    >>> format_value("/data/runs"), format_value("a, b")
    ('/data/runs', "'a, b'")
    """
    plain = str(text)
    return plain if _PLAIN.fullmatch(plain) else quote_value(plain)


def format_word(key: str, held: object) -> str:
    """Return `key=value` for another process, with the value as `format_value` writes it.

    >>> format_word("output_root", "/data/runs"), format_word("output_root", "/data/a,b")
    ('output_root=/data/runs', "output_root='/data/a,b'")
    """
    return f"{key}={format_value(held)}"


def shell_word(key: str, held: object) -> str:
    r"""Return `format_word` as a shell reads it.

    >>> shell_word("output_root", "/data/runs"), shell_word("data.prompts", "a b")
    ('output_root=/data/runs', '"data.prompts=\'a b\'"')
    """
    # First for Hydra, then for the shell around it.
    text = format_word(key, held)
    plain = shlex.quote(text)
    simple = not set(text) & set('"$`\\!')
    # Double quotes are easier to read, where the shell changes nothing inside them.
    return f'"{text}"' if plain != text and simple else plain


def quote_path_word(given: str) -> str:
    """Return a word whose value is always a path (`hydra.run.dir=DIR`) quoted, and others as they
    are."""
    key, is_pair, held = given.partition("=")
    if not is_pair or key not in _LITERAL or _QUOTED.fullmatch(held):
        return given
    return format_word(key, held)
