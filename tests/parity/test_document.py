"""measured-curves.md shows every case, as one run measured it; splits.md names every file of ds_configs."""

from __future__ import annotations

from parity.splits import cases
from support.launch import ROOT
from support.tiny import TOLERANCES

REFERENCE = ROOT / "docs" / "reference"
TEXT = (REFERENCE / "measured-curves.md").read_text()


def test_every_case_has_its_row_and_is_within_its_band():
    rows = {tuple(cells[1:4]): cells[4:] for line in TEXT.splitlines() if len(cells := split(line)) == 9}
    for case in cases():
        loss, norm, _, held, _ = rows[case.split.name, str(case.world_size), case.precision]
        assert float(loss) < TOLERANCES[case.precision][0]
        assert float(norm) < TOLERANCES[case.precision][1]
        if "NVMe" in case.split.name:
            assert held == "-"
        else:  # all ranks together hold Adam's two moments, and the parameters in fp32 and as they compute
            whole = 12 if case.precision == "fp32" or "torch" in case.json else 14
            assert float(held) > 0.98 * whole / case.world_size


def split(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


def test_the_claim_of_the_readme_is_that_of_the_table():
    rows = [split(line) for line in TEXT.splitlines() if len(split(line)) == 9]
    largest = max(float(number) for row in rows if row[3] == "fp32" for number in row[4:6])
    assert largest < 3e-7
    assert "3e-7" in (ROOT / "README.md").read_text()


def test_every_shipped_file_has_its_line():
    text = (REFERENCE / "splits.md").read_text()
    for path in (ROOT / "ds_configs").glob("*.json"):
        assert f"| `{path.name}` |" in text
