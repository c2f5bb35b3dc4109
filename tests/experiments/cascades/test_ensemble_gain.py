from __future__ import annotations

import numpy as np
import pytest

from earlyexit.reroute import SLOPE
from experiments.cascades.ensemble_gain import Said, goes_on, measure, print_lines, ways


def said(seed: int, count: int = 3000, skills: tuple[float, float] = (2.4, 2.5)) -> Said:
    """Two models that err by themselves, the large one a little less often."""
    rng = np.random.default_rng(seed)
    truth_N = rng.integers(0, 5, count)
    logits = [rng.normal(size=(count, 5)) + skill * np.eye(5)[truth_N] for skill in skills]
    small, large = (np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in logits)
    return Said(probabilities=(small, large), truth_N=truth_N)


def test_inputs_are_rerouted_by_what_is_promised_by_tabis_rule_and_all_of_them() -> None:
    known = said(0)
    found = {name: (c, k) for name, _, c, k in ways(known)}
    assert set(found) == {"1 % promised", "Tabi", "all"}
    confidence_N = known.confidence_NL[:, 0]
    assert goes_on(known, *found["all"]).all()
    threshold, _ = found["1 % promised"]
    rerouted_N = goes_on(known, threshold, np.inf)[:, 0]
    assert np.array_equal(rerouted_N, confidence_N < threshold)
    answers = [each_NC.argmax(1) for each_NC in known.probabilities]
    assert (answers[0] != answers[1])[~rerouted_N].sum() <= 0.02 * len(confidence_N)
    c, k = found["Tabi"]
    assert k == SLOPE
    assert goes_on(known, c, k)[confidence_N <= c].all()


def test_every_way_to_reroute_is_weighed_in_every_way_on_rows_that_weights_have_not_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known, unseen = said(0), said(1)
    lines = list(measure("clinc150", known, unseen))
    assert {(line.rerouted, line.rule) for line in lines} >= {
        (rerouted, rule) for rerouted in ("1 % promised", "all") for rule in ("accuracy", "likelihood", "best")
    }
    by_name = {(line.rerouted, line.rule): line for line in lines}
    everyone = by_name["all", "likelihood"]
    assert everyone.share == 1
    assert everyone.gain.num_inputs == 3000
    assert everyone.gain.before == unseen.right_NL[:, 1].mean()
    assert everyone.gain.low > 0
    assert everyone.on
    mixed_NC = everyone.weight * unseen.probabilities[0] + (1 - everyone.weight) * unseen.probabilities[1]
    assert everyone.gain.after == pytest.approx((mixed_NC.argmax(1) == unseen.truth_N).mean())
    print_lines(lines)
    assert "likelihood" in capsys.readouterr().out
