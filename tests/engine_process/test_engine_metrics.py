"""Whether an engine hangs is read off its counters."""

from hypothesis import given
from hypothesis import strategies as st

from engine.backends.engine_metrics import HangWatch, Sample, grown, read_sample

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} c"} 2.0
vllm:num_requests_running{engine="1",model_name="a b} c"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:generation_tokens_total{engine="0"} 100.0
vllm:generation_tokens_total{engine="1"} 1.5e+02
vllm:generation_tokens_created{engine="0"} 1.7960410402270143e+09
vllm:prompt_tokens_total 7
vllm:request_success_total{engine="0",finished_reason="stop"} 4.0 1796041040000
vllm:kv_cache_usage_perc{engine="0"} 0.25
process_open_fds 12.0
"""


def test_values_are_sums_over_engines() -> None:
    assert read_sample(TEXT) == Sample(running=5.0, waiting=1.0, progress=261.25)


def test_an_engine_without_statistics_says_nothing() -> None:
    assert read_sample("process_open_fds 12.0\n") == Sample(None, None, None)


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    read_sample(text)


def test_a_counter_that_was_reset_grew_from_zero() -> None:
    assert (grown(10, 12), grown(10, 3), grown(10, 10)) == (2, 3, 0)


def watched(*samples: Sample | None) -> list[bool]:
    """What a watch says, one reading each second, if three seconds without progress are hanging."""
    watch = HangWatch(now=0, after=3)
    return [watch.hangs(sample, now=second) for second, sample in enumerate(samples, 1)]


def busy(progress: float | None) -> Sample:
    return Sample(running=1, waiting=0, progress=progress)


def test_requests_without_progress_for_the_whole_time_are_hanging() -> None:
    assert watched(*[busy(5)] * 5) == [False, False, False, True, True]


def test_any_progress_starts_the_time_anew_also_a_reset() -> None:
    assert watched(busy(5), busy(5), busy(6), busy(6), busy(0), busy(0), busy(0)) == [False] * 7


def test_an_idle_engine_does_not_hang() -> None:
    assert watched(*[Sample(0, 0, 5)] * 9) == [False] * 9


def test_waiting_requests_count_too() -> None:
    assert watched(*[Sample(0, 1, 5)] * 4)[-1]


def test_an_engine_that_publishes_nothing_is_not_called_hung() -> None:
    assert watched(*[Sample(None, None, None)] * 9) == [False] * 9


def test_an_engine_that_does_not_answer_hangs() -> None:
    """Also without requests: it gets none, because it does not answer."""
    assert watched(*[None] * 4) == [False, False, True, True]
    assert watched(None, None, busy(5), None, None) == [False] * 5


def test_a_long_prompt_that_is_being_read_is_progress() -> None:
    """vLLM counts a prompt's tokens when it has read them all; what moves until then is the cache it fills."""
    text = 'vllm:num_requests_running 1.0\nvllm:prompt_tokens_total 7.0\nvllm:kv_cache_usage_perc{{engine="0"}} {}\n'
    assert not any(watched(*[read_sample(text.format(part / 10)) for part in range(9)]))


def test_a_watch_that_was_stopped_itself_blames_nobody() -> None:
    watch = HangWatch(now=0, after=60)
    assert not watch.hangs(busy(5), now=1)
    assert not watch.hangs(None, now=3600)
    assert not watch.hangs(busy(5), now=3601)
