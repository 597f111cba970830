"""The page on which people judge pairs of samples, and the service behind it.

    GET  /       the page itself, without data: it needs no token, and has that of its address.
    GET  /state  how many votes there are and are wanted.
    GET  /next   the next pair for a voter, with both samples, or how things stand.
    POST /vote   a `Vote`; also "skip".
    POST /undo   takes the voter's newest vote back, and answers as /next does, with its pair.

The service keeps the rules of the reward service (`digenrl.rewards.service`): loopback, a token,
limits, no other page's requests.
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import time
from collections import Counter
from hashlib import blake2b
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError

from digenrl import extras
from digenrl.extensions.votes.ballots import Ballots, Vote, Waiting, waiting_groups
from digenrl.rewards.service import Gate, Guard, Refused, Server, ServiceLimits, server_of

with extras.named_in_errors("serve", "the page of votes"):
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

_LIMITS = ServiceLimits(max_body_bytes=4096, body_s=10.0)
VOTER = re.compile(r"[0-9a-f]{8,32}")
_SHOWN_S = 15.0
"""Seconds for which others get another pair than the one that a voter looks at."""
Pair = tuple[int, int]


class VotePage(Guard):
    """Page and votes of one run.

    Args:
        folder: the run's folder of votes.
        token: that requests must carry, except for the page without data.
        a_step: votes that an RL step asks for.
        steps: RL steps of the run.
    """

    def __init__(self, folder: Path, token: str, a_step: int, steps: int) -> None:
        super().__init__(token)
        self._folder, self._ballots = folder, Ballots(folder)
        self._run: dict[str, object] = {
            "run": folder.parent.name,
            "a_step": a_step,
            "in_all": a_step * steps,
        }
        self._shown: dict[tuple[str, str], tuple[Pair, float]] = {}
        """(group, voter) -> pair that the voter looks at, and the time from which others get it."""

    def make_server(self) -> Server:
        """Return a server for addresses of loopback alone."""
        routes = [
            Route("/", self._serve_page),
            Route("/state", self._guard_handler(self._serve_state)),
            Route("/next", self._guard_handler(self._serve_next_pair)),
            Route("/vote", self._guard_handler(self._take_vote), methods=["POST"]),
            Route("/undo", self._guard_handler(self._undo_vote), methods=["POST"]),
        ]
        return server_of(Gate(Starlette(routes=routes), (), page="/"), _LIMITS)

    async def _serve_page(self, request: Request) -> Response:
        pages = Environment(
            loader=PackageLoader("digenrl.extensions.votes", ""),
            autoescape=True,
            undefined=StrictUndefined,
        )
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "img-src data:; media-src data:; connect-src 'self'; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        page = pages.get_template("page.html.j2").render(nonce=nonce)
        return HTMLResponse(page, headers=headers)

    async def _serve_state(self, request: Request) -> Response:
        self._ballots.read_new_votes()
        return JSONResponse(self._vote_progress())

    async def _serve_next_pair(self, request: Request) -> Response:
        return self._answer_next_pair(request.query_params.get("voter", ""))

    async def _take_vote(self, request: Request) -> Response:
        vote = await self._read_vote(request)
        if vote.choice == "undo":
            raise Refused(422, "send what is taken back to /undo")
        self._require_waiting(vote)
        self._append_vote(vote)
        self._shown.pop((vote.group, vote.voter), None)
        return self._answer_next_pair(vote.voter)

    async def _undo_vote(self, request: Request) -> Response:
        asked = await self._read_vote(request)
        groups = [each.path.name for each in waiting_groups(self._folder)]
        last = self._ballots.last_of(asked.voter, groups)
        if last is None:
            raise Refused(409, "nothing to undo: groups that were judged are being trained")
        self._append_vote(last.model_copy(update={"choice": "undo"}))
        pair = last.left, last.right
        self._shown[last.group, last.voter] = pair, time.monotonic() + _SHOWN_S
        return self._answer_next_pair(asked.voter)

    def _append_vote(self, vote: Vote) -> None:
        if not self._ballots.append_vote(vote):
            raise Refused(507, "votes.jsonl takes no more: the disk or the file is full")

    def _require_waiting(self, vote: Vote) -> None:
        groups = {each.path.name: each.group for each in waiting_groups(self._folder)}
        if vote.group not in groups:
            raise Refused(409, "this group has its scores already")
        if not groups[vote.group].has_pair(vote):
            raise Refused(422, "there is no such pair in this group")

    async def _read_vote(self, request: Request) -> Vote:
        """Return the vote of a request, whose body is bounded in bytes and time."""
        body = bytearray()
        try:
            async with asyncio.timeout(_LIMITS.body_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > _LIMITS.max_body_bytes:
                        raise Refused(413, f"a vote has at most {_LIMITS.max_body_bytes} bytes")
            return Vote.model_validate_json(bytes(body))
        except TimeoutError as error:
            raise Refused(408, "the vote was not complete in time") from error
        except ValidationError as error:
            raise Refused(422, "this is no vote") from error

    def _answer_next_pair(self, voter: str) -> Response:
        """Return the next pair of a voter, or that none waits."""
        if not VOTER.fullmatch(voter):
            raise Refused(422, "say who votes: voter=8 to 32 digits of base 16")
        now = time.monotonic()
        self._shown = {key: kept for key, kept in self._shown.items() if now < kept[1]}
        groups = waiting_groups(self._folder)
        for each in groups:
            votes = self._ballots.votes_of(each.path.name)
            pair = self._choose_pair(each, votes, voter)
            if pair is not None:
                given = len(each.group.pair_outcomes(votes))
                return JSONResponse(self._describe_pair(each, pair, given))
        complete = sum(
            each.group.is_complete(self._ballots.votes_of(each.path.name)) for each in groups
        )
        return JSONResponse(self._vote_progress() | {"waiting": len(groups), "judged": complete})

    def _describe_pair(self, each: Waiting, pair: Pair, given: int) -> dict[str, object]:
        group = each.group
        media = [_data_url(group.mime, each.read_media(sample)) for sample in pair]
        source = _data_url("image/png", each.read_media(group.samples)) if group.source else None
        return self._vote_progress() | {
            "group": each.path.name,
            "prompt": group.prompt,
            "left": pair[0],
            "right": pair[1],
            "media": media,
            "source": source,
            "video": group.mime.startswith("video"),
            "given": given,
            "wanted": max(group.wanted, given + 1),
        }

    def _vote_progress(self) -> dict[str, object]:
        return self._run | {"done": self._ballots.count_votes()}

    def _choose_pair(self, each: Waiting, votes: list[Vote], voter: str) -> Pair | None:
        """Return the most useful pair of a group, and remember who looks at it. None: the group is
        complete, or will be with the pairs that others look at now."""
        name, group = each.path.name, each.group
        if group.is_complete(votes):
            return None
        if (name, voter) in self._shown:
            return self._shown[name, voter][0]
        looked = [pair for (of, _), (pair, _) in self._shown.items() if of == name]
        judged = group.votes_per_sample(votes)
        judged.update(sample for pair in looked for sample in pair)
        met, skipped = Counter(map(frozenset, looked)), Counter[frozenset[int]]()
        for vote in votes:
            (skipped if vote.choice == "skip" else met)[frozenset((vote.left, vote.right))] += 1

        def pair_rank(pair: Pair) -> tuple[int, int, int, int, bytes]:
            needy = sum(judged[sample] < group.per_sample for sample in pair)
            same, key = frozenset(pair), f"{name} {len(votes)} {pair}".encode()
            seen = sum(judged[sample] for sample in pair)
            return skipped[same], met[same], -needy, seen, blake2b(key).digest()

        pairs = [
            (a, b)
            for a in range(group.samples)
            for b in range(a + 1, group.samples)
            if min(judged[a], judged[b]) < group.per_sample
        ]
        if not pairs:
            return None
        best = min(pairs, key=pair_rank)
        # People prefer a side: each pair is as often shown one way as the other.
        chosen = best if pair_rank(best)[-1][0] % 2 else (best[1], best[0])
        self._shown[name, voter] = chosen, time.monotonic() + _SHOWN_S
        return chosen


def _data_url(mime: str, content: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"
