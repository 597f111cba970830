"""LTX-2.3: LTX-2 with gated attention and a text projection of its own for each of the two streams.

Video and sound are one policy. All tokens get the noise of the SDE, and a log-prob is the mean over
the numbers of both.
"""

from __future__ import annotations

from digenrl.extensions.zoo.ltx2 import LTX2Policy
from digenrl.extensions.zoo.since import require_diffusers

require_diffusers("0.42", LTX2VideoTransformer3DModel="cross_attn_mod")


class LTX23Policy(LTX2Policy):
    """Policy of LTX-2.3 text-to-video with its sound; arguments in `DiffusersPolicy`.

    Under rewards of the video alone, the sound is trained by what the video reads of it, and by
    what its tokens do to the log-prob.
    """

    family = "ltx23"
    attention = tuple(
        f"{part}.{name}"
        for part in (
            "attn1",
            "attn2",
            "audio_to_video_attn",
            "audio_attn1",
            "audio_attn2",
            "video_to_audio_attn",
        )
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    )
    feed_forward = ("ff.net.0.proj", "ff.net.2", "audio_ff.net.0.proj", "audio_ff.net.2")
    modalities = ("video", "audio")
    unread = frozenset()
    unused = ()

    def add_family_parts(self) -> None:
        self.drawn = None
