"""The pipeline model's arithmetic, the recommendation. Nothing here judges a time."""

from itertools import pairwise

import numpy as np
import pytest

from npydata import AsyncDataLoader, MmapDataset, write_tokens
from npydata.loader.pipeline import lanes
from npydata.loader.tuning import (
    CANDIDATES,
    PROBES,
    Costs,
    calibrate,
    choose,
    costs_of,
    recommend,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("throughput") / "tokens.npy"
    write_tokens(path, [np.arange(20_000, dtype=np.uint16)])
    return path


def followed(taught, step_s, fetch_s, workers, prefetch, batches=64, **rest):
    pipeline = taught.Pipeline(step_s, fetch_s, workers, prefetch * workers, **rest)
    return taught.timeline(pipeline, batches)


def rate(taught, *args, **options):
    return followed(taught, *args, **options).batches_per_s


class TestPromises:
    def test_a_loader_with_room_is_as_fast_as_the_slower_side(self, taught):
        assert rate(taught, 4.0, 1.0, 1, 4) == pytest.approx(1 / 4)
        assert rate(taught, 1.0, 4.0, 1, 4) == pytest.approx(1 / 4)
        assert rate(taught, 1.0, 4.0, 2, 4) == pytest.approx(1 / 2)
        assert rate(taught, 1.0, 4.0, 8, 4) == pytest.approx(1)

    def test_batches_are_taken_in_order_and_after_they_were_made(self, taught):
        trips = followed(taught, 1.0, 3.0, 2, 2, batches=20).trips
        for before, after in pairwise(trips):
            assert after.taken >= before.done
        assert all(trip.begun < trip.made <= trip.taken < trip.done for trip in trips)

    def test_no_more_batches_exist_than_the_window_holds(self, taught):
        for workers, prefetch in ((1, 1), (2, 2), (3, 1)):
            trips = followed(taught, 5.0, 1.0, workers, prefetch, batches=30).trips
            for k, trip in enumerate(trips):
                waiting = sum(other.taken > trip.begun for other in trips[:k])
                assert waiting < workers * prefetch

    def test_a_worker_makes_one_batch_at_a_time(self, taught):
        trips = followed(taught, 0.5, 3.0, 3, 2, batches=30).trips
        for worker in range(3):
            mine = [trip for trip in trips if trip.worker == worker]
            assert len(mine) == 10
            assert all(a.made <= b.begun for a, b in pairwise(mine))

    def test_what_workers_share_bounds_their_speed(self, taught):
        assert rate(taught, 0.0, 4.0, 4, 4, serial_s=2.0) == pytest.approx(1 / 2)
        assert rate(taught, 0.0, 4.0, 1, 4, serial_s=2.0) == pytest.approx(1 / 4)

    def test_a_window_of_one_batch_pays_for_two_wakes(self, taught):
        assert rate(taught, 0.0, 2.0, 1, 1, wake_s=0.5) == pytest.approx(1 / 3.0)
        assert rate(taught, 2.0, 2.0, 1, 1, wake_s=0.5) == pytest.approx(1 / 3.0)
        assert rate(taught, 2.0, 2.0, 1, 8, wake_s=0.5) > 1 / 2.6

    def test_larger_handoffs_pay_for_fewer_wakes(self, taught):
        assert rate(taught, 0.0, 1.0, 1, 1, wake_s=1.0) == pytest.approx(1 / 3)
        assert rate(taught, 0.0, 1.0, 1, 8, wake_s=1.0, batches_per_handoff=8) == pytest.approx(
            8 / (8 + 2)
        )

    def test_a_consumer_that_is_slower_than_its_loader_waits_for_nothing(self, taught):
        assert followed(taught, 4.0, 1.0, 1, 4).wait_share == 0
        assert followed(taught, 1.0, 4.0, 1, 4).wait_share == pytest.approx(0.75)


def test_a_gantt_chart_has_a_lane_per_worker_and_one_for_the_consumer():
    bars = lanes(Costs(fetch_s=1.0, serial_s=0.0, wake_s=0.0).predict(1.0, 2, 2, 4))
    assert [name for name, *_ in bars] == sorted(
        (name for name, *_ in bars), key=lambda name: (name == "consumer", name)
    )
    assert {role for *_, role in bars} == {"cpu", "gpu"}


def test_costs_come_back_out_of_the_speeds_they_cause():
    costs = Costs(fetch_s=2.0, serial_s=1.5, wake_s=0.25)
    times = {probe: 1 / costs.predict(0.0, *probe).batches_per_s for probe in PROBES}
    found = costs_of(times)
    assert (found.fetch_s, found.serial_s) == pytest.approx((2.0, 1.5), rel=0.05)
    assert found.wake_s == pytest.approx(0.25, rel=0.3)


def test_workers_that_are_twice_as_fast_as_one_share_nothing():
    times = dict(zip(PROBES, (2.0, 1.0, 3.0), strict=True))
    assert costs_of(times) == Costs(fetch_s=2.0, serial_s=0.0, wake_s=0.5)


def test_calibrating_measures_all_probes(path):
    costs = calibrate(MmapDataset(path, 16), seconds=0.01, repeats=1)
    assert costs.fetch_s > 0
    assert costs.serial_s >= 0
    assert costs.wake_s >= 0


# the recommendation


def test_the_cheapest_setting_with_headroom_is_enough():
    advice = choose({(1, 2): 150.0, (1, 8): 250.0, (2, 8): 900.0}, step_s=0.01)
    assert advice.settings == {"num_workers": 1, "prefetch_factor": 8}
    assert advice.enough
    assert "2.5 times as fast as a step of 10 ms" in str(advice)
    assert "250 times as fast" in choose({(1, 8): 250.0}, step_s=1.0).reason


def test_without_a_step_the_cheapest_of_the_fastest_is_chosen():
    advice = choose({(1, 2): 100.0, (1, 8): 196.0, (2, 8): 200.0}, step_s=0)
    assert advice.settings == {"num_workers": 1, "prefetch_factor": 8}


def test_a_loader_that_can_not_keep_up_is_called_so():
    scarce = choose({(1, 2): 150.0, (2, 8): 160.0}, step_s=0.01)
    slow = choose({(1, 2): 40.0, (2, 8): 60.0}, step_s=0.01)
    assert (scarce.enough, slow.enough) == (False, False)
    assert "little to spare" in scarce.reason
    assert "make samples cheaper" in slow.reason


def test_a_recommendation_is_one_of_the_candidates_and_fits_the_loader(path):
    dataset = MmapDataset(path, 16)
    advice = recommend(dataset, step_s=1.0, seconds=0.02, repeats=1, batch_size=4)
    assert tuple(advice.settings.values()) in CANDIDATES
    assert AsyncDataLoader(dataset, **advice.settings).config.num_workers == advice.num_workers
