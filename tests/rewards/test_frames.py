"""Property tests of the wire schema: what is written is read back, and nothing else is read."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digenrl.rewards import frames
from digenrl.rewards.protocol import Identity
from digenrl.types import Prompt

quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
prompt = st.builds(
    Prompt, text, st.none() | text, st.none() | text, st.dictionaries(text, json_values, max_size=3)
)
shape = st.lists(st.integers(1, 4), min_size=3, max_size=4)
fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
IDENTITY = Identity("m", "d")
REQUEST_ID = "0123456789abcdef"


def split(frame: bytes) -> tuple[bytes, bytearray]:
    json_bytes, payload_bytes = frames.parse_header(frame[: frames.HEADER.size])
    body = frame[frames.HEADER.size :]
    assert len(body) == json_bytes + payload_bytes
    return body[:json_bytes], bytearray(body[json_bytes:])


def request_of(rows: int) -> frames.ScoreRequest:
    document, payload = split(
        frames.encode_request(torch.zeros(rows, 3, 1, 1), [Prompt("p")] * rows, REQUEST_ID)
    )
    return frames.decode_request(document, len(payload))


def honest_response(scores: list[float]) -> dict:
    return json.loads(
        frames.encode_response(request_of(len(scores)), torch.tensor(scores), IDENTITY)
    )


@pytest.mark.heavy
@quick
@given(
    st.lists(prompt, min_size=1, max_size=3),
    shape,
    st.sampled_from(list(frames.WIRE_DTYPES)),
    st.integers(0, 2**31),
)
def test_requests_come_back_as_they_were_sent(prompts, sample, dtype, seed):
    media = torch.rand(len(prompts), *sample, generator=torch.Generator().manual_seed(seed))
    document, payload = split(frames.encode_request(media, prompts, REQUEST_ID, dtype))
    request = frames.decode_request(document, len(payload))
    assert frames.decode_prompts(request) == prompts
    assert [p.uid for p in frames.decode_prompts(request)] == [p.uid for p in prompts]
    got = frames.decode_media(request.media, payload)
    assert got.dtype == torch.float32
    bound = {"float32": 0.0, "float16": 5e-4, "uint8": 0.5 / 255 + 1e-6}[dtype]
    assert (got - media).abs().max() <= bound


@quick
@given(st.lists(fp32 | st.just(math.nan), min_size=1, max_size=8))
def test_scores_come_back_exactly(scores):
    document = frames.encode_response(request_of(len(scores)), torch.tensor(scores), IDENTITY)
    assert "NaN" not in document
    got, identity = frames.decode_response(document.encode(), REQUEST_ID, len(scores))
    assert torch.equal(got.nan_to_num(7.5), torch.tensor(scores).nan_to_num(7.5))
    assert torch.equal(got.isnan(), torch.tensor(scores).isnan())
    assert identity == IDENTITY


@quick
@given(st.lists(fp32, min_size=1, max_size=5), st.integers(0, 4), json_values)
def test_a_score_is_a_finite_number_or_the_answer_is_refused(scores, row, value):
    document = honest_response(scores)
    row %= len(scores)
    document["scores"][row] = {"id": document["scores"][row]["id"], "score": value}
    raw = json.dumps(document).encode()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and math.isfinite(torch.tensor(float(value)).item()):
        got, _ = frames.decode_response(raw, REQUEST_ID, len(scores))
        assert got[row] == torch.tensor(float(value))
    else:
        with pytest.raises(frames.FrameError):
            frames.decode_response(raw, REQUEST_ID, len(scores))


@quick
@given(st.permutations(range(4)))
def test_only_the_asked_order_is_accepted(order):
    document = honest_response([0.0, 1.0, 2.0, 3.0])
    document["scores"] = [document["scores"][row] for row in order]
    if order == [0, 1, 2, 3]:
        assert frames.decode_response(json.dumps(document).encode(), REQUEST_ID, 4)[0].tolist() == [
            0,
            1,
            2,
            3,
        ]
    else:
        with pytest.raises(frames.FrameError, match="in this order"):
            frames.decode_response(json.dumps(document).encode(), REQUEST_ID, 4)


@quick
@given(st.data())
def test_no_field_may_be_missing_added_or_of_another_type(data):
    document = honest_response([0.5, 0.25])
    node = data.draw(st.sampled_from([document, document["identity"], document["scores"][0]]))
    key = data.draw(st.sampled_from(sorted(node)))
    kind = data.draw(st.sampled_from(["drop", "add", "retype"]))
    if kind == "drop":
        del node[key]
    elif kind == "add":
        node[key + "_"] = node[key]
    else:
        node[key] = data.draw(
            st.sampled_from(
                [None, True, [], {}, [node[key]], 7 if isinstance(node[key], str) else "7"]
            )
        )
    with pytest.raises(frames.FrameError):
        frames.decode_response(json.dumps(document).encode(), REQUEST_ID, 2)


@quick
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_with_one_kind_of_error(raw):
    for decode in (
        lambda: frames.decode_response(raw, REQUEST_ID, 1),
        lambda: frames.decode_request(raw, 3),
        lambda: frames.decode_description(raw),
    ):
        with pytest.raises(frames.FrameError):
            decode()
    if len(raw) >= frames.HEADER.size and not raw.startswith(frames.MAGIC):
        with pytest.raises(frames.FrameError):
            frames.parse_header(raw[: frames.HEADER.size])


@quick
@given(st.integers(-5, 5).filter(bool))
def test_a_payload_of_another_length_is_refused(difference):
    document, payload = split(
        frames.encode_request(torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2, REQUEST_ID)
    )
    with pytest.raises(frames.FrameError, match="bytes"):
        frames.decode_request(document, len(payload) + difference)


def test_a_request_needs_one_unique_id_per_sample():
    document = json.loads(
        split(frames.encode_request(torch.zeros(2, 3, 2, 2), [Prompt("p")] * 2, REQUEST_ID))[0]
    )
    for ids in (["a", "a"], ["a"], ["a", "b", "c"]):
        with pytest.raises(frames.FrameError, match="unique id"):
            frames.decode_request(json.dumps({**document, "ids": ids}).encode(), 2 * 3 * 4 * 4)


def test_a_dimension_cannot_be_zero_negative_or_astronomic():
    document = json.loads(
        split(frames.encode_request(torch.zeros(1, 3, 2, 2), [Prompt("p")], REQUEST_ID))[0]
    )
    for shape in ([1, 3, 2, 0], [1, 3, -2, -2], [1, 3, 2], [1, 3, 2, 1 << 40], [1, 1, 1, 1, 1, 3]):
        media = {"shape": shape, "dtype": "float32"}
        with pytest.raises(frames.FrameError):
            frames.decode_request(json.dumps({**document, "media": media}).encode(), 48)


def test_metadata_that_is_no_json_is_named():
    with pytest.raises(frames.FrameError, match="metadata"):
        frames.encode_request(
            torch.zeros(1, 3, 2, 2), [Prompt("p", metadata={"x": object()})], REQUEST_ID
        )
    with pytest.raises(frames.FrameError, match="metadata"):
        frames.encode_request(
            torch.zeros(1, 3, 2, 2), [Prompt("p", metadata={"x": math.nan})], REQUEST_ID
        )
