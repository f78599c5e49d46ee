"""What the actors brought, as metrics, against loops over the groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collate import make_groups

from learner.collate import guided
from learner.outcome import experience_metrics


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4))
def test_the_gain_of_guidance_is_that_within_groups_that_have_both_kinds(seed, count, members):
    groups = make_groups(seed, count, members, sequences=1)
    rng = np.random.default_rng(seed)
    for group in groups:
        for one in group.trajectories:
            one.success = bool(rng.random() < 0.5)
    found = experience_metrics(groups)
    everyone = [one for group in groups for one in group.trajectories]
    kinds = {
        "guided": [float(one.success) for one in everyone if guided(one)],
        "unguided": [float(one.success) for one in everyone if not guided(one)],
    }
    share = len(kinds["guided"]) / len(everyone)
    assert found.pop("experience/retrieved_share") == pytest.approx(share)
    for kind, successes in kinds.items():
        if successes:
            mean = sum(successes) / len(successes)
            assert found.pop(f"experience/{kind}_success") == pytest.approx(mean)
    gains = []
    for group in groups:
        mine = [float(one.success) for one in group.trajectories if guided(one)]
        others = [float(one.success) for one in group.trajectories if not guided(one)]
        if mine and others:
            gains.append(sum(mine) / len(mine) - sum(others) / len(others))
    if gains:
        gain = found.pop("experience/guided_gain")
        assert gain == pytest.approx(sum(gains) / len(gains))
    assert found == {}
