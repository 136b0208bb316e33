"""Activation checkpointing keeps what it says: one tensor a block, every Nth, all but the cheap."""

from __future__ import annotations

import re

import pytest
from parity.activations import MODES, kept_bytes
from support.launch import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_each_mode_keeps_less_than_the_one_before_as_the_document_shows():
    kept = {mode: kept_bytes(mode) for mode in MODES}
    assert kept["full"] < 0.5 * kept["selective"]
    assert kept["full"] < 0.6 * kept[2]
    assert kept["selective"] < 0.75 * kept["none"]
    assert kept[2] < 0.75 * kept["none"]
    text = (ROOT / "docs" / "reference" / "measured-curves.md").read_text()
    for mode in MODES:
        shown = float(re.search(rf"\| `{mode}` \| \d+ MiB \| ([\d.]+) \|", text)[1])
        assert abs(shown - kept[mode] / kept["none"]) < 0.02
