"""The memory of the device, stage by stage."""

from __future__ import annotations

import threading

from digenrl.record.progress import OTHER, Progress


def test_the_most_since_the_last_edge_counts_for_every_open_stage() -> None:
    figures = iter((10, 30, 20, 15, 5, 12))
    progress = Progress()
    progress.gauge = lambda: next(figures)
    with progress.stage("train"):  # 10 before
        with progress.stage("optimizer reduce"):  # 30 before
            assert progress.peaks["train"] == 30  # and 20 until the end
        assert progress.peaks["optimizer"] == 20
    with progress.stage("wait straggler"):  # 5 before, 12 until the end
        assert progress.peaks[OTHER] == 10
    assert progress.peaks == {OTHER: 12, "train": 30, "optimizer": 20}


def test_work_of_another_thread_counts_while_this_one_waits() -> None:
    progress = Progress()
    progress.gauge = lambda: 7
    inside, done = threading.Event(), threading.Event()

    def decode() -> None:
        with progress.stage("decode"):
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=decode, name="scorer")
    thread.start()
    assert inside.wait(10)
    progress.gauge = lambda: 40
    with progress.stage("wait reward"):
        stages = {stretch.thread: stretch.stage for stretch in progress.current_stretches()}
    assert stages == {"main": "wait reward", "scorer": "decode"}
    done.set()
    thread.join()
    assert [stretch.thread for stretch in progress.current_stretches()] == ["main"]
    assert progress.peaks == {OTHER: 7, "decode": 40}


def test_without_a_device_nothing_is_measured() -> None:
    progress = Progress()
    with progress.stage("train"):
        progress.mark_progress()
    assert progress.peaks == {}


def test_a_thread_is_in_its_innermost_stage_and_each_sign_counts_up() -> None:
    progress, seen = Progress(), list[tuple[str, bool]]()

    def note() -> int:
        (stretch,) = progress.current_stretches()
        seen.append((stretch.stage, stretch.known))
        return stretch.number

    numbers = [note()]
    with progress.stage("train"):
        numbers.append(note())
        with progress.stage("wait tail"):
            with progress.stage("send"):
                numbers.append(note())
            numbers.append(note())
            progress.mark_progress()
            numbers.append(note())
        numbers.append(note())
    numbers.append(note())
    stages = ["", "train", "send", "wait tail", "wait tail", "train", ""]
    assert [stage for stage, _ in seen] == stages
    # known: a stretch of the stage has ended before, as that of an outer one does when an inner begins
    assert [known for _, known in seen] == [False, False, False, True, True, True, False]
    assert numbers == sorted(set(numbers))
    assert [stretch.waits for stretch in progress.current_stretches()] == [False]


def test_of_two_stages_of_one_name_the_inner_one_ends_first() -> None:
    progress = Progress()
    first, second = progress.stage("send"), progress.stage("train")
    first.__enter__()
    second.__enter__()
    with progress.stage("send"):
        pass
    assert progress.current_stretches()[0].stage == "train"
    first.__exit__(None, None, None)  # it overlaps the other
    assert progress.current_stretches()[0].stage == "train"
    second.__exit__(None, None, None)
    assert progress.current_stretches()[0].stage == ""


def test_a_device_that_holds_nothing_has_no_byte() -> None:
    progress = Progress()
    progress.gauge = lambda: 0
    with progress.stage("train"):
        pass
    assert progress.peaks == {OTHER: 0, "train": 0}
