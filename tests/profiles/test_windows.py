from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from profiles.forecast import forecast_survival
from profiles.stream import ExitStream, Observations, StreamShape, empty
from profiles.windows import Window, WindowEstimate, survival_history, windows
from tests.profiles.windows_of import NONE, RECORDS, SHAPE, estimate, observe, random_records, values, worth

PLANS: tuple[dict[int, float], ...] = ({}, {1: 0.75, 3: 0.8}, {1: 0.5}, {3: 0.6})
ASKED: tuple[dict[int, float], ...] = ({}, {1: 0.9}, {3: 0.7}, {1: 0.75, 3: 0.55}, {1: 0.25, 3: 0.9})


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("requested", ASKED, ids=str)
@pytest.mark.parametrize("stay", [False, True], ids=["stop", "stay"])
@pytest.mark.parametrize("num_probes", [1, 2, 3])
def test_estimates_are_unbiased_over_all_draws(
    plan: dict[int, float], requested: dict[int, float], num_probes: int, stay: bool
) -> None:
    truth = RECORDS.outcome(requested)
    by_sampled: dict[str, list[list[float]]] = {"survival": [], "agreement": []}
    for drawn in itertools.combinations(range(4), num_probes):
        found = estimate(RECORDS, plan, np.isin(range(4), drawn), requested, stay=stay)
        if found.agreement is not None:  # there is a probe among the rest, or there is no rest
            by_sampled["agreement"].append([found.agreement.value])
        if found.survival is not None:
            by_sampled["survival"].append(values(found))
    assert np.mean(by_sampled["survival"], axis=0) == pytest.approx(truth.survival)
    assert np.mean(by_sampled["agreement"], axis=0) == pytest.approx([truth.agreement])


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan], ids=str)
@pytest.mark.parametrize("requested", ASKED, ids=str)
def test_inputs_that_stay_are_observed_by_all_active_ramps(plan: dict[int, float], requested: dict[int, float]) -> None:
    records = random_records(500, seed=3)
    plan, requested = ({0 if ramp == 1 else 3: limit for ramp, limit in each.items()} for each in (plan, requested))
    found = estimate(records, plan, [False] * 500, requested, stay=True)
    truth = records.outcome(requested)
    if requested.keys() <= plan.keys():  # a census: also of stricter thresholds, and of the full model's answers
        assert figures(found) == pytest.approx([*truth.survival, truth.agreement])
        assert found.survival is not None
        assert found.survival[-1].effective_inputs == pytest.approx(500)
    else:
        assert found.survival is None


def figures(found: WindowEstimate) -> list[float]:
    assert found.agreement is not None
    return [*values(found), found.agreement.value]


@pytest.mark.parametrize(
    ("plan", "requested"),
    [
        pytest.param({1: 0.8, 4: 0.9}, {0: 0.7, 3: 0.8}, id="other ramps"),
        pytest.param({0: 0.6, 1: 0.6, 3: 0.6, 4: 0.6}, {1: 0.8, 3: 0.8}, id="more cautious"),
        pytest.param({3: 0.9}, {0: 0.95, 3: 0.85}, id="one more ramp"),
    ],
)
def test_batches_of_probes_have_no_bias_and_less_error(plan: dict[int, float], requested: dict[int, float]) -> None:
    records = random_records(4000, seed=1)
    truth = records.outcome(requested)
    expected = np.array([*truth.survival, truth.agreement])
    rng = np.random.default_rng(2)
    errors, plain = [], []
    for _ in range(200):
        probe_N = np.repeat(rng.random(500) < 0.04, 8)
        errors.append(np.array(figures(estimate(records, plan, probe_N, requested))) - expected)
        alone = records.subset(np.flatnonzero(probe_N)).outcome(requested)
        plain.append(np.array([*alone.survival, alone.agreement]) - expected)
    error_TF = np.array(errors)
    deviation_F = error_TF.std(0)
    # The mean of 200 draws is within 3.5 standard errors of the truth, and our error is never larger.
    assert (np.abs(error_TF.mean(0)) <= 3.5 * deviation_F / np.sqrt(200) + 1e-12).all()
    assert (deviation_F <= np.std(plain, axis=0) * 1.02 + 1e-12).all()


def test_effective_inputs_predict_the_spread_of_estimates() -> None:
    # New inputs each time: the spread comes from drawing inputs and from drawing probes.
    rng = np.random.default_rng(4)
    estimates = []
    for seed in range(150):
        found = estimate(random_records(1500, seed), {3: 0.9}, rng.random(1500) < 0.05, {0: 0.7, 3: 0.9})
        assert found.survival is not None
        estimates.append((found.survival[2].value, found.survival[2].effective_inputs))
    value, inputs = np.mean(estimates, axis=0)
    assert np.std([each for each, _ in estimates]) == pytest.approx(np.sqrt(value * (1 - value) / inputs), rel=0.15)
    assert 65 < inputs < 85  # close to the 75 probes, because nothing else was observed here


def test_a_small_unobserved_share_is_estimated_in_its_middle() -> None:
    # 99 of 100 inputs leave at ramp 1 at 0.9. One left at 0.5; at 0.6 it would continue, past ramp 3 or not.
    sure, unsure = [0], [1]
    many = RECORDS.subset(np.array(sure * 99 + unsure))
    found = estimate(many, {1: 0.5}, [False] * 100, {1: 0.6, 3: 0.7})
    assert values(found) == pytest.approx([1.0, 1.0, 0.01, 0.01, 0.005, 0.005])
    assert found.survival is not None
    # The estimate may be off by half an input: a variance of 1/4, in addition to that of 100 inputs.
    variance = (100 * 0.005 * 0.995 + 0.25) / 100**2
    assert found.survival[4].effective_inputs == pytest.approx(0.005 * 0.995 / variance)
    two = RECORDS.subset(np.array(sure * 98 + unsure * 2))
    assert estimate(two, {1: 0.5}, [False] * 100, {1: 0.6, 3: 0.7}).survival is None


def test_all_inputs_count_before_the_first_requested_ramp_and_then_probes() -> None:
    found = estimate(RECORDS, {}, [True, False, False, False], {3: 0.7})
    assert found.survival is not None
    assert [share.effective_inputs for share in found.survival] == pytest.approx([4, 4, 4, 4, 1, 1])
    assert survival_history([found]).inputs_WK[0, 0] == found.num_inputs == 4
    # At ramp 3 of the plan all exits are known. Only probes show which inputs would continue after block 4.
    found = estimate(random_records(100, seed=3), {3: 0.9}, np.arange(100) < 10, {3: 0.9, 4: 0.9})
    assert worth(found)[3] == pytest.approx(100)
    # All are the rest and probes b, c and d. c leaves at ramp 1; b leaves at ramp 3, and d continues.
    found = estimate(RECORDS, {}, [False, True, True, True], {1: 0.75, 3: 0.7})
    assert found.go_on is not None
    assert (found.go_on[3].probes_reaching, found.go_on[3].probes_going) == (2, 1)
    # Shares of 2/3 and 1/2: drawing four inputs, and three of the four without replacement.
    variance = (2 / 3) * 0.25 / 4 + (2 / 3) * 0.25 * (1 / 3 - 1 / 4)
    assert worth(found)[3] == pytest.approx(0.25 * (2 / 3) ** 2 / variance)


def test_the_effective_inputs_of_a_conditional_share_predict_its_spread() -> None:
    rng = np.random.default_rng(7)
    shares, worths = [], []
    for seed in range(150):
        plan, requested = {1: 0.7}, {1: 0.75, 3: 0.8}
        found = estimate(random_records(1500, seed), plan, rng.random(1500) < 0.05, requested)
        assert found.go_on is not None
        shares.append(values(found)[4] / values(found)[3])
        worths.append(found.go_on[3].effective_inputs())
    share = np.mean(shares)
    assert np.std(shares) == pytest.approx(np.sqrt(share * (1 - share) / np.mean(worths)), rel=0.15)
    assert 30 < np.mean(worths) < 75  # of 75 probes, those that pass ramp 1


def test_agreement_averages_losses_between_0_and_1() -> None:
    losses_NR = np.array([[0.1, 0.2], [0.4, 0.3], [0.8, 0.5], [1.0, 0.9]])
    records = replace(
        RECORDS, losses_NR=losses_NR, zero_one=False, true_losses_NE=np.column_stack([losses_NR, np.full(4, 0.25)])
    )
    requested = {1: 0.75, 3: 0.8}  # a and c leave after block 1, b after block 3, d after the last
    seen = observe(records, requested, np.array([True] * 4))
    found = Window(start_s=0, observations=seen).estimate(requested)
    assert found.agreement is not None
    assert found.agreement.value == pytest.approx(1 - (0.1 + 0.3 + 0.8 + 0) / 4)
    back = Window(start_s=0, observations=seen).records()
    assert back.zero_one is False
    assert back.losses_NR == pytest.approx(losses_NR)


def test_the_probes_of_a_window_become_exit_records() -> None:
    seen = observe(RECORDS, {1: 0.75}, np.array([False, True, False, True]), [120, 121, 122, 123])
    window = Window(start_s=120, observations=seen)
    records = window.records()
    assert (window.num_probes, records.sample_ids) == (2, ("120-1", "120-3"))
    assert records.scores_NR.tolist() == RECORDS.subset(np.array([1, 3])).scores_NR.tolist()
    np.testing.assert_array_equal(records.times_s_N, [121, 123])
    assert records.outcome({1: 0.75, 3: 0.8}).exits_N.tolist() == [3, 5]
    assert RECORDS.true_losses_NE is not None
    np.testing.assert_array_equal(records.true_losses_NE, RECORDS.true_losses_NE[[1, 3]])


def test_a_window_without_inputs_has_no_estimate() -> None:
    found = Window(start_s=0, observations=empty(SHAPE)).estimate({1: 0.5})
    assert (found.num_inputs, found.survival, found.go_on, found.agreement) == (0, None, None, None)


# Windows of streams

SLIGHT = StreamShape(score="confidence", num_blocks=3, ramps=(0,))


def unplanned(go_on_N: npt.NDArray[np.bool_], probe_N: npt.NDArray[np.bool_], start_s: float = 0) -> Window:
    """Returns a window under a plan without ramps: only probes show which inputs would continue at its ramp, at 0.5."""
    num_inputs = len(go_on_N)
    return Window(
        start_s=start_s,
        observations=Observations(
            shape=SLIGHT,
            times_s_N=np.full(num_inputs, start_s),
            probe_N=probe_N,
            stayed_N=np.zeros(num_inputs, dtype=bool),
            active_NR=np.zeros((num_inputs, 1), dtype=bool),
            exits_N=np.full(num_inputs, 2, dtype=np.int16),
            scores_NR=np.where(probe_N, np.where(go_on_N, 0.1, 0.9), np.nan).astype(np.float32)[:, None],
            losses_NR=np.where(probe_N, 0, np.nan).astype(np.float32)[:, None],
        ),
    )


@pytest.mark.parametrize("going", [0, 1, 10, 19, 20])
def test_if_only_probes_are_known_the_effective_inputs_are_their_number(going: int) -> None:
    found = unplanned(np.arange(1000) < going, np.arange(1000) < 20).estimate({0: 0.5})
    assert found.survival is not None
    assert found.survival[1].value == pytest.approx(going / 20)
    assert found.survival[1].effective_inputs == pytest.approx(20)
    assert worth(found) == pytest.approx([20, 1000 * going / 20])  # exits after block 1 do not matter


@pytest.mark.parametrize("go_on", [0.995, 0.98, 0.02])
def test_pooled_windows_of_few_probes_have_no_bias(go_on: float) -> None:
    rng = np.random.default_rng(6)
    live = [unplanned(rng.random(1200) < go_on, rng.random(1200) < 0.02, start_s=120.0 * index) for index in range(200)]
    history = survival_history([window.estimate({0: 0.5}) for window in live])
    pooled = history.go_on_WR[:, 0].sum() / history.reach_WR[:, 0].sum()
    # 200 windows of 24 probes: three standard errors.
    assert pooled == pytest.approx(go_on, abs=3 * np.sqrt(go_on * (1 - go_on) / 4800))
    forecast = forecast_survival(history)
    assert forecast.survival_K[1] == pytest.approx(go_on, abs=4 * np.sqrt(go_on * (1 - go_on) / 4800))


def test_windows_whose_probes_agree_count_no_more_than_others() -> None:
    # At ramp 1 of the plan four fifths leave; nine tenths of these would pass ramp 3. The others leave at ramp 3.
    rng = np.random.default_rng(8)
    found = []
    for _ in range(400):
        out_N = rng.random(400) < 0.8
        scores_NR = np.stack([np.where(out_N, 0.6, 0.1), np.where(out_N & (rng.random(400) < 0.9), 0.1, 0.9)], axis=1)
        records = replace(RECORDS.subset(np.zeros(400, dtype=np.int64)), scores_NR=scores_NR.astype(np.float32))
        found.append(estimate(records, {1: 0.5, 3: 0.5}, rng.random(400) < 0.02, {1: 0.8, 3: 0.5}))
    history = survival_history(found)
    pooled = history.go_on_WR[:, 3].sum() / history.reach_WR[:, 3].sum()
    # About six probes per window: three standard errors. Weighted by its own probes each, the windows give 0.75.
    assert pooled == pytest.approx(0.8 * 0.9, abs=0.015)
    assert forecast_survival(history).go_on_R[3] == pytest.approx(0.8 * 0.9, abs=0.015)


def test_windows_begin_at_multiples_of_the_period() -> None:
    stream, times_s = ExitStream(SHAPE, since_s=0), [5, 119.9, 120, 361, 130]
    stream.append(observe(RECORDS.subset(np.arange(5) % 4), {1: 0.75}, np.zeros(5, dtype=bool), times_s))
    found = windows(stream, now_s=480)
    assert [(window.start_s, window.num_inputs) for window in found] == [(0, 2), (120, 2), (240, 0), (360, 1)]
    assert len(windows(stream, now_s=479)) == 3
    assert found[2].estimate({1: 0.75}).survival is None
    stream = ExitStream(SHAPE, since_s=100)
    stream.append(observe(RECORDS, {}, np.array(NONE), [110, 130, 140, 150]))
    assert [(window.start_s, window.num_inputs) for window in windows(stream, 240)] == [(120, 3)]


def test_estimates_become_a_history_with_missing_windows() -> None:
    requested = {1: 0.8, 3: 0.7}
    found = [
        estimate(RECORDS, {1: 0.5}, [False, True, False, False], requested),
        estimate(RECORDS, {1: 0.5}, NONE, requested),
    ]
    history = survival_history(found)
    assert history.missing_W.tolist() == [False, True]
    assert history.survival_WK[0].tolist() == [1.0, 1.0, 0.75, 0.75, 0.0, 0.0]


def test_a_stream_becomes_a_forecast_of_ramps_that_are_off() -> None:
    # Twelve windows of 1,600 inputs in batches of 8. The plan runs only ramp 3; the question is about ramps 0 and 3.
    rng = np.random.default_rng(5)
    requested = {0: 0.7, 3: 0.9}
    stream = ExitStream(StreamShape(score="confidence", num_blocks=6, ramps=(0, 1, 3, 4)), since_s=0)
    for index in range(12):
        probe_N = np.repeat(rng.random(200) < 0.1, 8)
        times_s = index * 120 + np.sort(rng.random(1600)) * 120
        stream.append(observe(random_records(1600, seed=index), {3: 0.9}, probe_N, times_s))
    found = [window.estimate(requested) for window in windows(stream, now_s=12 * 120)]
    forecast = forecast_survival(survival_history(found))
    truth = random_records(50_000, seed=99).outcome(requested).survival
    np.testing.assert_allclose(forecast.survival_K, truth, atol=0.03)
