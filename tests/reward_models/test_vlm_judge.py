"""The judge against a local endpoint that follows a script."""

from __future__ import annotations

import base64
import io
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from digenrl.data import load_prompts
from digenrl.rewards.protocol import RewardError, RewardUnavailable
from digenrl.types import Prompt
from reward_models.unified_reward import UnifiedPairs, UnifiedReward, published_question
from reward_models.vlm_judge import EditJudge, PairJudge, VlmJudge

PROMPTS = [Prompt("a {odd} fox"), Prompt("b")]
MEDIA = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def endpoint():
    """A server; `.answer(body)` -> (status, message content or raw bytes), `.bodies` = what was
    asked."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append((self.path, self.headers.get("Authorization"), body))
            status, content = server.answer(body)
            raw = (
                content if isinstance(content, bytes) else json.dumps(completion(content)).encode()
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(raw)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def completion(content):
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def judge_of(endpoint, **options):
    return VlmJudge(f"http://127.0.0.1:{endpoint.server_address[1]}/v1/", "judge-7b", **options)


def test_each_sample_is_asked_about_with_its_own_picture_and_prompt(endpoint, monkeypatch):
    monkeypatch.setenv("DIGENRL_JUDGE_TOKEN", "secret")

    def by_prompt(body):
        text = body["messages"][0]["content"][0]["text"]
        return 200, '```json\n{"score": 9}\n```' if text.endswith(
            "a {odd} fox"
        ) else '{"score": 2.5}'

    endpoint.answer = by_prompt
    judge = judge_of(endpoint)
    assert judge(MEDIA, PROMPTS).tolist() == pytest.approx([0.9, 0.25])
    for path, token, body in endpoint.bodies:
        assert (path, token, body["model"]) == ("/v1/chat/completions", "Bearer secret", "judge-7b")
        row = 0 if "fox" in body["messages"][0]["content"][0]["text"] else 1
        url = body["messages"][0]["content"][1]["image_url"]["url"]
        picture = np.array(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
        assert np.array_equal(picture, MEDIA[row].mul(255).round().byte().permute(1, 2, 0).numpy())
    assert "secret" not in judge.model_id
    judge.close()


def test_the_judge_of_an_edit_sees_the_source_before_the_result(endpoint):
    endpoint.answer = lambda body: (200, '{"score": 5}')
    edits, media = load_prompts("edits.jsonl")[:2], torch.zeros(2, 3, 64, 64)
    judge = EditJudge(f"http://127.0.0.1:{endpoint.server_address[1]}/v1", "judge-7b")
    assert judge(media, edits).tolist() == [0.5, 0.5]
    shown = []
    for _, _, body in endpoint.bodies:
        urls = [part["image_url"]["url"] for part in body["messages"][0]["content"][1:]]
        shown.append(
            [
                np.array(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
                for url in urls
            ]
        )
    sources = [np.asarray(edit.images[0].fit_to_size(64, 64)) for edit in edits]
    assert all(len(pictures) == 2 and not pictures[1].any() for pictures in shown)
    assert {pictures[0].tobytes() for pictures in shown} == {source.tobytes() for source in sources}
    with pytest.raises(ValueError, match="has no image"):
        EditJudge.check_prompts([Prompt("make it red")])
    judge.close()


def test_a_video_is_sent_as_frames(endpoint):
    endpoint.answer = lambda body: (200, '{"score": 1}')
    judge = judge_of(endpoint, frames=3)
    judge(MEDIA[:, None].expand(2, 8, 3, 4, 4), PROMPTS)
    assert [len(body["messages"][0]["content"]) for _, _, body in endpoint.bodies] == [4, 4]
    judge.close()


@pytest.mark.parametrize(
    "content",
    [
        *(
            "8",
            "I like it: 8",
            '{"score": "8"}',
            '{"score": true}',
            '{"score": NaN}',
            '{"score": 11}',
            '{"score": -1}',
            "",
        ),
        *(None, b"<html>", b"[]", b"{}"),
    ],
)
def test_an_answer_outside_the_scale_or_form_is_missing(endpoint, content):
    endpoint.answer = lambda body: (200, content if "fox" in json.dumps(body) else '{"score": 10}')
    judge = judge_of(endpoint)
    with pytest.raises(RewardUnavailable) as caught:
        judge(MEDIA, PROMPTS)
    assert math.isnan(caught.value.scores[0])
    assert caught.value.scores[1] == 1
    judge.close()


@pytest.mark.parametrize(
    ("status", "kind"), [(500, RewardUnavailable), (429, RewardUnavailable), (401, RewardError)]
)
def test_a_refusal_is_missing_or_ends_the_run(endpoint, status, kind):
    endpoint.answer = lambda body: (status, "")
    judge = judge_of(endpoint, retries=0)
    with pytest.raises(RewardError) as caught:
        judge(MEDIA, PROMPTS)
    assert type(caught.value) is kind
    assert len(endpoint.bodies) <= 2  # never retried
    judge.close()


def test_a_judge_that_hangs_is_missing_at_the_deadline(endpoint):
    released = threading.Event()
    endpoint.answer = lambda body: (200, '{"score": 1}') if released.wait(5) else (500, "")
    judge = judge_of(endpoint, deadline_s=0.3)
    with pytest.raises(RewardUnavailable, match=r"within 0\.3 s") as caught:
        judge(MEDIA, PROMPTS)
    released.set()
    assert caught.value.scores.isnan().all()
    judge.close()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="no judge URL") as caught:
        VlmJudge("http://u:hidden@host/v1", "m")
    assert "hidden" not in str(caught.value)
    with pytest.raises(ValueError, match="must contain"):
        VlmJudge("http://host/v1", "m", question="how good?")


# ---- retries, a budget, pairs, UnifiedReward


@pytest.mark.parametrize("busy", [429, 503])
def test_a_busy_judge_is_asked_again_within_limits(endpoint, busy):
    endpoint.answer = lambda body: (busy, "") if len(endpoint.bodies) < 3 else (200, '{"score": 4}')
    judge = judge_of(endpoint, retries=2)
    assert judge(MEDIA[:1], PROMPTS[:1]).tolist() == pytest.approx([0.4])
    assert len(endpoint.bodies) == 3
    endpoint.bodies.clear()
    with pytest.raises(RewardUnavailable, match=f"HTTP {busy}"):
        judge_of(endpoint, retries=1)(MEDIA[:1], PROMPTS[:1])
    assert len(endpoint.bodies) == 2


def test_the_budget_bounds_the_requests_and_then_ends_the_run(endpoint):
    endpoint.answer = lambda body: (200, '{"score": 4}')
    judge = judge_of(endpoint, budget=3)
    judge(MEDIA, PROMPTS)
    with pytest.raises(RewardError, match=r"had 3 requests .* scorer\.budget: raise") as caught:
        judge(MEDIA, PROMPTS)
    assert type(caught.value) is RewardError
    assert len(endpoint.bodies) <= 3  # the third may be on its way


def redness(body):
    """How red each shown picture is."""
    urls = [
        part["image_url"]["url"] for part in body["messages"][0]["content"] if "image_url" in part
    ]
    files = (io.BytesIO(base64.b64decode(url.partition(",")[2])) for url in urls)
    return [np.array(Image.open(file))[..., 0].mean() / 255 for file in files]


def reds(*levels):
    media = torch.zeros(len(levels), 3, 8, 8)
    media[:, 0] = torch.tensor(levels)[:, None, None]
    return media


GROUP = [Prompt("red")] * 3


def test_the_sample_that_is_better_in_both_orders_wins(endpoint):
    def better(body):
        first, second = redness(body)
        return 200, json.dumps({"better": 0 if first == second else 1 if first > second else 2})

    endpoint.answer = better
    judge = PairJudge(f"http://127.0.0.1:{endpoint.server_address[1]}/v1", "j")
    media, prompts = reds(0.2, 0.9, 0.2, 0.5, 0.6), [*GROUP, Prompt("b"), Prompt("b")]
    assert judge(media, prompts).tolist() == [0.25, 1.0, 0.25, 0.0, 1.0]
    assert len(endpoint.bodies) == 3 * 2 + 2
    with pytest.raises(RewardUnavailable, match="task_size") as caught:
        judge(media[:4], prompts[:4])
    assert caught.value.scores[:3].tolist() == [0.25, 1.0, 0.25]
    assert caught.value.scores[3].isnan()


def test_a_judge_that_prefers_a_place_prefers_nothing(endpoint):
    endpoint.answer = lambda body: (200, '{"better": 1}')
    judge = PairJudge(f"http://127.0.0.1:{endpoint.server_address[1]}/v1", "j")
    assert judge(reds(0.1, 0.9, 0.5), GROUP).tolist() == [0.5, 0.5, 0.5]


@pytest.fixture
def template(tmp_path):
    """A file as the authors write theirs, which must not be run."""
    path = tmp_path / "question.py"
    path.write_text(
        "import nowhere\nprompt = ''\nask = ('How good? ' f'Text Caption: [{prompt}]')\n"
        "print(f'{prompt}')\n"
    )
    return str(path)


def test_unified_reward_asks_its_authors_question_and_reads_their_answer(endpoint, template):
    endpoint.answer = lambda body: (200, f"fox: 1\nFinal Score: {1 + 4 * redness(body)[0]:.2f}")
    url = f"http://127.0.0.1:{endpoint.server_address[1]}/v1"
    judge = UnifiedReward(url, "unified", template, {"Final Score": 1.0}, constrained=True)
    assert judge(reds(0.0, 1.0), PROMPTS).tolist() == pytest.approx([0.2, 1.0])
    content = endpoint.bodies[0][2]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    assert content[1]["text"] in {f"How good? Text Caption: [{p.text}]" for p in PROMPTS}
    assert "response_format" not in endpoint.bodies[0][2]
    assert judge.model_id.startswith("unified_reward(unified, scale=5")
    assert judge.model_id != UnifiedReward(url, "unified", template, {"Style Score": 1.0}).model_id


AXES = {"Alignment Score": 0.5, "Style Score": 0.5}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Alignment Score (1-5): 2.5\nCoherence Score (1-5): 1\nStyle Score (1-5): 4.5", 0.7),
        ("Alignment Score (1-5): 2", None),
        ("Alignment Score: 2 Style Score: 10", None),
        ("Alignment Score: 2 Style Score: 3 Style Score: 4", None),
        ("2.5", None),
    ],
)
def test_an_answer_of_another_form_is_missing_and_not_0(endpoint, template, answer, score):
    endpoint.answer = lambda body: (200, answer)
    url = f"http://127.0.0.1:{endpoint.server_address[1]}/v1"
    judge = UnifiedReward(url, "unified", template, AXES)
    if score is not None:
        assert judge(MEDIA[:1], PROMPTS[:1]).tolist() == pytest.approx([score])
    else:
        with pytest.raises(RewardUnavailable, match="not of the form"):
            judge(MEDIA[:1], PROMPTS[:1])


def test_unified_pairs_read_the_authors_words(endpoint, template):
    def better(body):
        first, second = redness(body)
        same = "Both images are equally good."
        return 200, same if first == second else f"Image {1 if first > second else 2} is better."

    endpoint.answer = better
    judge = UnifiedPairs(f"http://127.0.0.1:{endpoint.server_address[1]}/v1", "unified", template)
    assert judge(reds(0.2, 0.9, 0.2), GROUP).tolist() == [0.25, 1.0, 0.25]


def test_a_template_without_a_question_is_refused(tmp_path):
    (tmp_path / "none.py").write_text("print('hello')")
    for wrong in (None, str(tmp_path / "none.py")):
        with pytest.raises(ValueError, match=r"has no question with \{prompt\}\. Give a file"):
            published_question(wrong)
