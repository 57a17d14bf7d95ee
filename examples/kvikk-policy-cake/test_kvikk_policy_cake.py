"""What every policy must meet, and what is special about this one."""

from __future__ import annotations

from typing import Any

import pytest
from kvikk_policy_cake import CAKE

from kvikk.compress import KVCacheParams
from kvikk.errors import InvalidRequest
from kvikk.testing.policies import PolicyConformance


class TestCAKE(PolicyConformance):
    @pytest.fixture
    def policy(self) -> CAKE:
        return CAKE()


def test_it_is_asked_for_by_its_name() -> None:
    params = KVCacheParams(policy="cake", policy_options={"query_window": 16, "gamma": 5}, budget="25%")
    assert params.method.policy == CAKE(query_window=16, gamma=5.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"query_window": 1}, "query_window is 1: it must lie between 2 and 256"),
        ({"gamma": -1.0}, "gamma is -1.0: it must be a number of at least 0"),
        ({"kernel": 4}, "kernel is 4: it must be odd"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        KVCacheParams(policy="cake", policy_options=options, budget="25%")
