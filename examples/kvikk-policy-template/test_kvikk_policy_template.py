"""What every policy must meet, and what is special about this one."""

from __future__ import annotations

import pytest
from kvikk_policy_template import VATP

from kvikk.compress import KVCacheParams
from kvikk.errors import InvalidRequest
from kvikk.testing.policies import PolicyConformance


class TestVATP(PolicyConformance):
    @pytest.fixture
    def policy(self) -> VATP:
        return VATP()


def test_it_is_asked_for_by_its_name() -> None:
    params = KVCacheParams(policy="vatp", policy_options={"query_window": 16}, budget="25%")
    assert params.method.policy == VATP(query_window=16)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="query_window is 0: it must lie between 1 and 256"):
        KVCacheParams(policy="vatp", policy_options={"query_window": 0}, budget="25%")
