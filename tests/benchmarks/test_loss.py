"""The benchmarks of losses and of memory over many rounds, in miniature."""

import json

import pytest

from benchmarks import loss, memory_slope


@pytest.mark.ray
@pytest.mark.full
def test_loss_from_copies_and_from_a_checkpoint_come_to_the_same_models():
    found = json.loads(json.dumps(loss.run(None, True)))
    assert found["loss"]["equal"]
    assert (found["loss"]["now"]["rounds_again"], found["loss"]["before"]["rounds_again"]) == (1, 3)
    assert found["loss"]["now"]["seconds"] > 0 and 0 < found["copies"]["large"]["share"] < 1
    assert found["copies"]["large"]["state_bytes"] == 4 * 8 * found["copies"]["large"]["parameters"]
    assert "from copies" in loss.report(found)


@pytest.mark.ray
@pytest.mark.full
def test_memory_of_every_process_is_followed_over_the_rounds():
    found = json.loads(json.dumps(memory_slope.run(None, True)))
    assert set(found["slopes"]) == {"driver", "server", "clients-0", "clients-1"}
    assert found["rounds"] == [2, 4, 6, 8, 10, 12]
    assert all(min(sizes) > 1e7 for sizes in found["bytes"].values())
    assert "bytes a round" in memory_slope.report(found)


def test_reports_of_a_loss_and_of_memory_say_which_limit_was_missed():
    found = {
        "limits": {"ratio": 0.5, "share": 0.1}, "after": 9, "ratio": 0.6,
        "loss": {
            "equal": True, "round_seconds": 1.0, "now": {"seconds": 6.0, "rounds_again": 1, "processes": 1},
            "before": {"seconds": 10.0, "rounds_again": 10, "processes": 3},
        },
        "copies": {"small": {"seconds": 0.01, "share": 0.01}},
    }  # fmt: skip
    text = loss.report(found)
    assert "0.60 of the seconds, limit 0.5: MISSED" in text and "1.0%  kept" in text
    slopes = {"limit": 2048.0, "rounds": [1, 2], "bytes": {"driver": [1, 2]}, "slopes": {"driver": 4096.0}}
    assert "4,096 bytes a round at most, limit 2,048: MISSED" in memory_slope.report(slopes)
